-- lease_judging: (judge, request, ttl_ms) -> {fence, ticket, group id, number of earlier judgings, member records ...} of
-- the group that has waited longest; false if no group waits. A lease that has expired counts as a judging in vain. A
-- request that is repeated because its reply was lost gets the same lease again.
cap_leases('judging', ARGV[3])
local judging = base .. ':judging'
local request = base .. ':lease_request:' .. ARGV[2]
local MAX_SKIPPED = 100 -- groups in one call: other clients wait meanwhile

local function first_waiting()
  for _ = 1, MAX_SKIPPED do
    local id = redis.call('ZRANGEBYSCORE', judging, '-inf', now_ms(), 'LIMIT', 0, 1)[1]
    if not id then return end
    if flaw(id, 'judging') then
      set_back(id, 'judging')
    elseif redis.call('HEXISTS', group_key(id), 'judge_fence') == 0 then
      return id
    else
      count('expired_judgings', 1)
      if judged_in_vain(id) then return id end
    end
  end
end

local id = or_nothing(redis.pcall('GET', request))
if id then
  if flaw(id, 'judging') or redis.call('HGET', group_key(id), 'judge_request') ~= ARGV[2] then return false end
else
  id = first_waiting()
  if not id then return false end
  redis.call('ZADD', judging, now_ms() + ARGV[3], id)
  redis.call('HSET', group_key(id), 'judge_fence', next_fence(), 'judge', ARGV[1], 'judge_request', ARGV[2])
  redis.call('SET', request, id, 'PX', ARGV[3])
end
local lease = redis.call('HMGET', group_key(id), 'judge_fence', 'ticket')
lease[3], lease[4] = id, tonumber(redis.call('HGET', group_key(id), 'num_judgings') or '0')
local records = stored_records(id)
for member = 0, size_of(id) - 1 do lease[#lease + 1] = records[member] end
return lease
