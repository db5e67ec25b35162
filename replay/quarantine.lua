-- quarantine: (epoch, group_id, member, description, most to keep). The poisoned payload is kept aside; its group is
-- dropped.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local id, member = ARGV[2], ARGV[3]
if not redis.call('ZSCORE', base .. ':claimed', id) then return end
local record = redis.call('HGET', group_key(id), 'member:' .. member)
local kept = base .. ':poison:' .. id .. ':' .. member
redis.call('RENAME', blob_key(id, member, record), kept)
redis.call('LPUSH', base .. ':quarantine', ARGV[4])
redis.call('LPUSH', base .. ':quarantined_payloads', kept)
if redis.call('LLEN', base .. ':quarantine') > tonumber(ARGV[5]) then
  redis.call('RPOP', base .. ':quarantine')
  redis.call('UNLINK', redis.call('RPOP', base .. ':quarantined_payloads'))
end
drop(id, 'claimed', 'poison')
