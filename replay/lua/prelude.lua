-- What the scripts share. KEYS[1] names the stream; no key has that name, so there is always a second one in KEYS: with
-- one alone, a cluster that moves the slot would run the script where nothing has arrived yet, instead of TRYAGAIN.
-- A group is one hash, and is a member of exactly one sorted set:
-- queued (by id), leased (by deadline), ready (by order of finishing), claimed (by the step of its last use) or
-- quarantined (by order of arrival).
local base = KEYS[1]
local counters = base .. ':counters'
local epoch_key = string.gsub(base, '[^:]+$', 'epoch') -- not from KEYS: actors may not read it, whatever they pass
local STATES = { 'queued', 'leased', 'ready', 'claimed', 'quarantined' }

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

-- The first thing that a learner's verb asks, and a person's, who has no epoch: an actor fails here, before any change.
local function fenced_out(epoch)
  local newest = redis.call('GET', epoch_key) or '0'
  if epoch ~= '' and tonumber(epoch) < tonumber(newest) then
    return redis.error_reply('FENCEDOUT by epoch ' .. newest)
  end
  if epoch ~= '' and tonumber(epoch) > 0 and newest == '0' then
    return redis.error_reply('FORGOTTEN: no epoch is known, and this one was acquired here')
  end
end

local function state_of(id)
  for _, state in ipairs(STATES) do
    if redis.call('ZSCORE', base .. ':' .. state, id) then return state end
  end
end

-- The steps that a group was claimed for, as '3,5,', rise: each is later than those before.
local function uses_of(id)
  return redis.call('HGET', group_key(id), 'uses') or ''
end

local function num_in(uses)
  local _, num = string.gsub(uses, ',', '')
  return num
end

local function last_in(uses)
  return tonumber(string.match(uses, '(%d+),$'))
end

local function num_uses(id)
  return num_in(uses_of(id))
end

local function last_use(id)
  return last_in(uses_of(id))
end

-- A ready group is in more sorted sets, so that no verb has to walk all of them: by version, by score, and, once it was
-- used, by step. A name in the set of scores begins with the order of finishing, so that equals are sorted by age.
local function place_among_scores(id)
  return string.format('%016d:%s', redis.call('HGET', group_key(id), 'finished'), id)
end

local function leave(id, state)
  redis.call('ZREM', base .. ':' .. state, id)
  count(state, -1)
  if state == 'leased' then
    redis.call('HDEL', group_key(id), 'fence', 'actor', 'request')
  elseif state == 'ready' then
    redis.call('ZREM', base .. ':ready_by_version', id)
    redis.call('ZREM', base .. ':ready_by_score', place_among_scores(id))
    if redis.call('ZREM', base .. ':ready_by_step', id) == 1 then count('ready_uses', 0 - num_uses(id)) end
  end
end

local function enter(id, state, score)
  redis.call('ZADD', base .. ':' .. state, score, id)
  redis.call('HSET', group_key(id), 'changed_ms', now_ms())
  count(state, 1)
end

local function enter_ready(id)
  local group = redis.call('HMGET', group_key(id), 'finished', 'oldest_policy_version', 'score')
  enter(id, 'ready', group[1])
  redis.call('ZADD', base .. ':ready_by_version', group[2], id)
  redis.call('ZADD', base .. ':ready_by_score', group[3] and 0 - group[3] or '-inf', place_among_scores(id))
  local step = last_use(id)
  if step then
    redis.call('ZADD', base .. ':ready_by_step', step, id)
    count('ready_uses', num_uses(id))
  end
end

-- A group that is leased has a fence, and no other.
local function holds(id, fence)
  return redis.call('HGET', group_key(id), 'fence') == fence
end

-- The record of a member or its partial, made by record_of() in payloads.py, is attempt:fence:oldest_policy_version:
-- num_bytes:num_tokens:num_turns:duration_ms:actor; the first two name the payload. Here they are, and the next three
-- once more, each; nothing where it is no record.
local function read_record(record)
  return string.match(record, '^((%d+):(%d+)):(%d+):%d+:%d+:%d+:%d+:')
end

local function payload_key(kind, id, member, record)
  return base .. ':' .. kind .. ':' .. id .. ':' .. member .. ':' .. read_record(record)
end

-- Of the members that are stored, by member.
local function stored_records(id)
  local records = {}
  for member = 0, redis.call('HGET', group_key(id), 'num_members') - 1 do
    records[member] = redis.call('HGET', group_key(id), 'member:' .. member) or nil
  end
  return records
end

-- What the members or partials took to make, added up in `account`.
local function count_work(account, records)
  local sums = { 0, 0, 0 }
  for _, record in pairs(records) do
    local sizes = { string.match(record, '^%d+:%d+:%d+:%d+:(%d+):(%d+):(%d+):') }
    for i, size in ipairs(sizes) do sums[i] = sums[i] + size end
  end
  for i, name in ipairs({ 'tokens:', 'turns:', 'duration_ms:' }) do count(name .. account, sums[i]) end
end

-- What a missing member has so far leaves Redis, and is counted in `account`. Others go on from what was resumed or
-- superseded, so that no work was lost by these.
local function remove_partial(id, member, account)
  local record = redis.call('HGET', group_key(id), 'partial:' .. member)
  if not record then return end
  redis.call('UNLINK', payload_key('partial', id, member, record))
  redis.call('HDEL', group_key(id), 'partial:' .. member)
  count('partials:held', -1)
  count('partials:' .. account, 1)
  if account ~= 'resumed' and account ~= 'discarded:superseded' then count_work(account, { record }) end
end

-- The group and its payloads leave Redis; the members are counted in `account` from now on.
local function remove_group(id, account)
  local group, records = group_key(id), stored_records(id)
  local num_stored = 0
  for member = 0, redis.call('HGET', group, 'num_members') - 1 do
    if records[member] then
      redis.call('UNLINK', payload_key('blob', id, member, records[member]))
      num_stored = num_stored + 1
    end
    remove_partial(id, member, 'discarded:' .. string.gsub(account, '^dropped:', ''))
  end
  count_work(account, records)
  redis.call('DEL', group)
  count('trajectories:held', 0 - num_stored) -- not -num_stored: the negative of 0 is "-0"
  count('trajectories:' .. account, num_stored)
end

-- What follows is for groups that have just left their state.

local function close(id, account)
  remove_group(id, account)
  count(account, 1)
end

-- The uses of later steps than `step` never were; returns how many.
local function take_back(id, step)
  local before, kept = num_uses(id), ''
  if before == 0 then return 0 end
  for use in string.gmatch(uses_of(id), '%d+') do
    if tonumber(use) <= tonumber(step) then kept = kept .. use .. ',' end
  end
  redis.call('HSET', group_key(id), 'uses', kept)
  return before - num_uses(id)
end

-- What a model learned from is not dropped but retired: claimed for the step of its last use, and trained with it.
local function retired(id)
  local step = last_use(id)
  if step then enter(id, 'claimed', step) end
  return step ~= nil
end

local function drop(id, reason)
  if not retired(id) then close(id, 'dropped:' .. reason) end
end

-- ---

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
  leave(id, 'leased')
  if exhausted then
    drop(id, 'lease_expired')
  else
    enter(id, 'queued', id)
  end
end

local function expire_leases()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. ':leased', '-inf', now_ms(), 'LIMIT', 0, 100)) do
    expire(id)
  end
end
