-- heartbeat: (actor, ttl_ms, then group_id, fence for each) -> ids of the leases that are valid for another ttl_ms.
-- It renews before it sweeps: a late heartbeat saves a lease that no sweep has ended yet.
local deadline = now_ms() + ARGV[2]
local held = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  if holds(id, ARGV[i + 1]) and redis.call('HGET', group_key(id), 'actor') == ARGV[1] then
    redis.call('ZADD', base .. ':leased', deadline, id)
    held[#held + 1] = id
  end
end
cap_leases('leased', ARGV[2])
expire_leases()
return held
