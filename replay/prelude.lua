-- What the verbs share. KEYS[1] names the stream, KEYS[2] the learner's epoch; a group is one hash, and is a member of
-- exactly one sorted set: queued (by id), leased (by deadline), ready (by order of finishing) or claimed (by step).
local base = KEYS[1]
local counters = base .. ':counters'

-- With maxmemory reached, a script that has written may go on writing. So every verb begins with a write that changes
-- nothing: the books move and the learner drains while the payloads, which are plain SETs, wait.
redis.call('PERSIST', counters)

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function group_key(id)
  return base .. ':group:' .. id
end

local function count(name, by)
  redis.call('HINCRBY', counters, name, by)
end

local function fenced_out(epoch)
  local newest = redis.call('GET', KEYS[2]) or '0'
  if tonumber(epoch) < tonumber(newest) then
    return redis.error_reply('FENCEDOUT by epoch ' .. newest)
  end
end

local function move(id, from, to, score)
  redis.call('ZREM', base .. ':' .. from, id)
  redis.call('ZADD', base .. ':' .. to, score, id)
  redis.call('HSET', group_key(id), 'changed_ms', now_ms())
  count(from, -1)
  count(to, 1)
end

-- A member's record is attempt:fence:oldest_policy_version:num_bytes:actor, and the first two name its payload.
local function blob_key(id, member, record)
  return base .. ':blob:' .. id .. ':' .. member .. ':' .. string.match(record, '^%d+:%d+')
end

-- What a missing member has so far, attempt:fence:num_bytes:actor, leaves Redis and is counted in `account`.
local function remove_partial(id, member, account)
  local record = redis.call('HGET', group_key(id), 'partial:' .. member)
  if not record then return end
  redis.call('UNLINK', base .. ':partial:' .. id .. ':' .. member .. ':' .. string.match(record, '^%d+:%d+'))
  redis.call('HDEL', group_key(id), 'partial:' .. member)
  count('partials:held', -1)
  count('partials:' .. account, 1)
end

local function holds(id, fence)
  return redis.call('ZSCORE', base .. ':leased', id) and redis.call('HGET', group_key(id), 'fence') == fence
end

-- The group and its payloads leave Redis; `account` is where they are counted from now on.
local function close(id, from, account)
  local group = group_key(id)
  local num_members = tonumber(redis.call('HGET', group, 'num_members'))
  local num_stored = 0
  for member = 0, num_members - 1 do
    local record = redis.call('HGET', group, 'member:' .. member)
    if record then
      redis.call('UNLINK', blob_key(id, member, record))
      num_stored = num_stored + 1
    end
    remove_partial(id, member, 'discarded:' .. string.gsub(account, '^dropped:', ''))
  end
  redis.call('DEL', group)
  redis.call('ZREM', base .. ':' .. from, id)
  count(from, -1)
  count(account, 1)
  count('trajectories:held', 0 - num_stored) -- not -num_stored: the negative of 0 is "-0"
  count('trajectories:' .. account, num_stored)
end

local function drop(id, from, reason)
  close(id, from, 'dropped:' .. reason)
end

local function requeue(id)
  redis.call('HDEL', group_key(id), 'fence', 'actor', 'request')
  move(id, 'leased', 'queued', id)
end

-- The missing members of a lease that ended unannounced are tried again, and count the attempt: a task that kills its
-- actors must not kill all of them. A partial stays, and goes on as the next attempt.
local function expire(id)
  local group = group_key(id)
  local max_attempts = tonumber(redis.call('HGET', group, 'max_attempts'))
  local num_members = tonumber(redis.call('HGET', group, 'num_members'))
  local exhausted = false
  for member = 0, num_members - 1 do
    if redis.call('HEXISTS', group, 'member:' .. member) == 0 then
      count('redone_members', 1)
      exhausted = redis.call('HINCRBY', group, 'attempt:' .. member, 1) >= max_attempts or exhausted
    end
  end
  count('expired_leases', 1)
  if exhausted then
    drop(id, 'leased', 'lease_expired')
  else
    requeue(id)
  end
end

local function expire_leases()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. ':leased', '-inf', now_ms(), 'LIMIT', 0, 100)) do
    expire(id)
  end
end
