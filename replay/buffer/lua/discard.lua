-- discard: (group_id, member, record, reason). Removes the partial of this record: the actor that leased it cannot use
-- it.
if ARGV[4] ~= 'lost_payload' and ARGV[4] ~= 'poison' then return redis.error_reply('ERR malformed reason') end
if or_nothing(redis.pcall('HGET', group_key(ARGV[1]), 'partial:' .. ARGV[2])) == ARGV[3] then
  remove_partial(ARGV[1], ARGV[2], 'discarded:' .. ARGV[4])
end
