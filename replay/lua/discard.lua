-- discard: (group_id, member, record, reason). The partial of this record is of no use to whoever leased it.
if redis.call('HGET', group_key(ARGV[1]), 'partial:' .. ARGV[2]) == ARGV[3] then
  remove_partial(ARGV[1], ARGV[2], 'discarded:' .. ARGV[4])
end
