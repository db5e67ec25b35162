-- renew_judging: (judge, ttl_ms, then group_id, fence for each) -> ids of the judge's leases that are valid for another
-- ttl_ms.
local deadline = now_ms() + ARGV[2]
local held = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  if judges(id, ARGV[i + 1]) and redis.call('HGET', group_key(id), 'judge') == ARGV[1] then
    redis.call('ZADD', base .. ':judging', deadline, id)
    held[#held + 1] = id
  end
end
cap_leases('judging', ARGV[2])
return held
