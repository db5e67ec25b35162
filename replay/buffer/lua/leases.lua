-- Leases of groups, of actors and of judges: who holds one, how it is renewed, and what happens when it expires. It comes
-- after prelude.lua in every verb.

-- Whether the lease with this fence is still valid: only groups in `state` have the fields of such a lease.
local function holds(state, id, fence)
  return or_nothing(redis.pcall('HGET', group_key(id), LEASE[state][1])) == fence
end

-- A number above every earlier fence: not below the clock, so it is also above those that a server lost with its newest
-- writes, and those whose counter was damaged.
local function next_fence()
  local fence, clock = count('last_fence', 1), now_ms()
  if fence >= clock and fence < 1e14 then return fence end
  redis.call('HSET', counters, 'last_fence', clock)
  return clock
end

-- Ends an expired lease. Each missing member counts one more attempt: a task that kills its actors must not kill all of
-- them. A partial stays, and the next attempt continues it.
local function expire(id)
  local group = group_key(id)
  local max_attempts = tonumber(redis.call('HGET', group, 'max_attempts'))
  local exhausted = false
  for member = 0, size_of(id) - 1 do
    if redis.call('HEXISTS', group, 'member:' .. member) == 0 then
      count('redone_members', 1)
      exhausted = redis.call('HINCRBY', group, 'attempt:' .. member, 1) >= max_attempts or exhausted
    end
  end
  count('expired_leases', 1)
  leave(id, 'leased')
  if exhausted then
    drop(id, 'lease_expired')
  else
    enter(id, 'queued', id)
  end
end

local function expire_leases()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. ':leased', '-inf', now_ms(), 'LIMIT', 0, 100)) do
    if flaw(id, 'leased') then set_back(id, 'leased') else expire(id) end
  end
end

-- Ends a lease time from now what the server's clock, which was set back, would keep for longer than ten.
local function cap_leases(state, ttl_ms)
  local now, leased = now_ms(), base .. ':' .. state
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leased, now + 10 * ttl_ms, '(+inf', 'LIMIT', 0, 100)) do
    redis.call('ZADD', leased, now + ttl_ms, id)
  end
end

-- Renews leases, which ARGV lists: holder, ttl_ms, then group_id, fence for each. Returns the ids of the holder's leases
-- that are valid for another ttl_ms.
local function renew(state)
  local deadline, held = now_ms() + ARGV[2], {}
  for i = 3, #ARGV, 2 do
    local id = ARGV[i]
    if holds(state, id, ARGV[i + 1]) and redis.call('HGET', group_key(id), LEASE[state][2]) == ARGV[1] then
      redis.call('ZADD', base .. ':' .. state, deadline, id)
      held[#held + 1] = id
    end
  end
  cap_leases(state, ARGV[2])
  return held
end

-- Ends a judge's lease without a verdict, and counts it. Drops the group if it has been judged in vain too often: a
-- group that kills its judges must not kill all of them. Returns whether it may be judged again.
local function judged_in_vain(id)
  local group = group_key(id)
  redis.call('HDEL', group, unpack(LEASE.judging))
  local num_judgings = redis.call('HINCRBY', group, 'num_judgings', 1)
  if num_judgings < tonumber(redis.call('HGET', group, 'max_attempts')) then return true end
  leave(id, 'judging')
  drop(id, 'judge_failed')
  return false
end
