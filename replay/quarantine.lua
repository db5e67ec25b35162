-- quarantine: (epoch, or '' where a person asks; group_id, why, most to keep) -> 0 if there is no such group. It is kept
-- as it is, payloads and all; a lease on it is lost.
local refusal = ARGV[1] ~= '' and fenced_out(ARGV[1])
if refusal then return refusal end
local id = ARGV[2]
local state = state_of(id)
if not state then return 0 end
if state == 'quarantined' then return 1 end
redis.call('HDEL', group_key(id), 'fence', 'actor', 'request')
redis.call('HSET', group_key(id), 'why', ARGV[3])
leave(id, state)
enter(id, 'quarantined', redis.call('HINCRBY', counters, 'last_quarantined', 1))
if redis.call('ZCARD', base .. ':quarantined') > tonumber(ARGV[4]) then
  drop(redis.call('ZRANGE', base .. ':quarantined', 0, 0)[1], 'quarantined', 'poison')
end
return 1
