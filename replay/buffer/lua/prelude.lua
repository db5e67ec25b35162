-- The functions that the scripts share. KEYS[1] is the prefix of the stream's keys; no key has that name. A group is one
-- hash, and its id is in exactly one sorted set: queued (by id), leased (by deadline), judging (by the time from which a
-- judge may lease it), ready (by order of finishing), claimed (by the step of its last use) or quarantined (by order of
-- arrival).
local base = KEYS[1]
local counters = base .. ':counters'
local epoch_key = string.gsub(base, '[^:]+$', 'epoch') -- not from KEYS: actors may not read it, whatever they pass
local STATES = { 'queued', 'leased', 'judging', 'ready', 'claimed', 'quarantined' }
-- The fields of a lease, of an actor or of a judge, by the state of its group: fence, holder, request.
local LEASE = { leased = { 'fence', 'actor', 'request' }, judging = { 'judge_fence', 'judge', 'judge_request' } }
local MAX_MEMBERS = 4096
local MAX_RECORD = 1024 -- bytes; without the actor's name it has at most 106
local MAX_DESCRIPTION = 8192 -- bytes; MAX_REASON_CHARS in failures.py, with four bytes for each, and a few numbers
local MAX_DIGITS = 15 -- no counter of a run has so many, and doubles are exact up to there
local TOO_LONG = string.rep('%d', MAX_DIGITS)

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function group_key(id)
  return base .. ':group:' .. id
end

-- The stored text as a number; nil if it is not a whole number.
local function whole(text)
  return text and #text < MAX_DIGITS and string.find(text, '^%d+$') and tonumber(text) or nil
end

-- Whether a stored text is a number that is small enough to be increased.
local function may_be_followed(text)
  return (whole(text) or 1e13) < 1e13
end

-- A reply; nil if the key has another type. Other errors are raised, for example a missing permission.
local function or_nothing(reply)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply.err, 0) end
end

-- Adds to an account and returns its value. A damaged counter restarts at 0, so that no verb fails half-way; the learner
-- finds later that the books do not balance, and repairs them.
local function count(name, by)
  local counted = redis.pcall('HINCRBY', counters, name, by)
  if type(counted) == 'number' then return counted end
  if string.find(counted.err, 'WRONGTYPE', 1, true) then redis.call('DEL', counters) end
  redis.call('HSET', counters, name, 0)
  return redis.call('HINCRBY', counters, name, by)
end

-- The first check of a learner's verb, and of a person's verb, which has no epoch. An actor fails here, before any
-- change: it may not read the epoch.
local function fenced_out(epoch)
  local newest = or_nothing(redis.pcall('GET', epoch_key))
  if newest == false then newest = '0' end
  if not may_be_followed(newest) then return redis.error_reply('FORGOTTEN: ' .. epoch_key .. ' is malformed') end
  if epoch ~= '' and tonumber(epoch) < tonumber(newest) then
    return redis.error_reply('FENCEDOUT by epoch ' .. newest)
  end
  if epoch ~= '' and tonumber(epoch) > 0 and newest == '0' then
    return redis.error_reply('FORGOTTEN: ' .. epoch_key .. ' is missing, and this learner acquired an epoch here')
  end
end

local function state_of(id)
  for _, state in ipairs(STATES) do
    if or_nothing(redis.pcall('ZSCORE', base .. ':' .. state, id)) then return state end
  end
end

-- The steps that claimed a group, in rising order, as '3,5,'.
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

-- Whether all members have the same return.
local function is_equal(id)
  return redis.call('HEXISTS', group_key(id), 'is_equal') == 1
end

-- A ready group is also in index sets, so that no verb has to read every group: by version, and by step after its first
-- use.
local function leave(id, state)
  redis.call('ZREM', base .. ':' .. state, id)
  count(state, -1)
  if LEASE[state] then
    redis.call('HDEL', group_key(id), unpack(LEASE[state]))
  elseif state == 'ready' then
    redis.call('ZREM', base .. ':ready_by_version', id)
    if is_equal(id) then count('ready_equal', -1) end
    if redis.call('ZREM', base .. ':ready_by_step', id) == 1 then count('ready_uses', 0 - num_uses(id)) end
  end
end

local function enter(id, state, score)
  redis.call('ZADD', base .. ':' .. state, score, id)
  redis.call('HSET', group_key(id), 'changed_ms', now_ms())
  count(state, 1)
end

local function enter_ready(id)
  local group = redis.call('HMGET', group_key(id), 'finished', 'newest_policy_version')
  enter(id, 'ready', group[1])
  redis.call('ZADD', base .. ':ready_by_version', group[2], id)
  if is_equal(id) then count('ready_equal', 1) end
  local step = last_use(id)
  if step then
    redis.call('ZADD', base .. ':ready_by_step', step, id)
    count('ready_uses', num_uses(id))
  end
end

-- Makes a group ready for the first time: all members are stored, and judged if a judge marks the group.
local function finish(id)
  redis.call('HSET', group_key(id), 'finished', count('finished', 1))
  enter_ready(id)
end

-- Parses the record of a member or a partial, as record_of() in payloads.py writes it:
-- attempt:fence:newest_policy_version:num_bytes:num_tokens:num_turns:duration_ms:actor.
-- Returns 'attempt:fence', which is part of the payload's key, then attempt, fence and newest_policy_version; nil if
-- the record is malformed.
local function read_record(record)
  if #record > MAX_RECORD then return end
  local numbers, payload, attempt, fence, newest =
    string.match(record, '^(((%d+):(%d+)):(%d+):%d+:%d+:%d+:%d+):')
  if numbers and not string.find(numbers, TOO_LONG) then return payload, attempt, fence, newest end
end

-- Whether the text `member`, as Python writes a number, is one of a group's members.
local function is_member(member, num_members)
  return (whole(member) or num_members) < num_members and not string.find(member, '^0.')
end

local function payload_key(kind, id, member, record)
  return base .. ':' .. kind .. ':' .. id .. ':' .. member .. ':' .. (read_record(record) or '')
end

-- How many members a group has; `stored` is the text if it is read already. Raises DAMAGED for a malformed number, so
-- that no loop runs up to it.
local function size_of(id, stored)
  local size = whole(stored or redis.call('HGET', group_key(id), 'num_members')) or 0
  if size < 1 or size > MAX_MEMBERS then error('DAMAGED: group ' .. id .. ' has no num_members') end
  return size
end

-- The names of the fields of up to 100 members from `first` on: Lua cannot pass more than some thousand arguments at
-- once.
local function members_fields(first, num_members)
  local names = {}
  for member = first, math.min(first + 99, num_members - 1) do
    names[#names + 1] = 'member:' .. member
    names[#names + 1] = 'attempt:' .. member
    names[#names + 1] = 'partial:' .. member
  end
  return unpack(names)
end

local function flaw_of_members(id, num_members, num_stored)
  local num_found = 0
  for first = 0, num_members - 1, 100 do
    local facts = redis.call('HMGET', group_key(id), members_fields(first, num_members))
    for i = 1, #facts, 3 do
      local record, attempts, partial = facts[i], facts[i + 1], facts[i + 2]
      if record and not read_record(record) then return 'has a malformed record of a stored member' end
      if attempts and not whole(attempts) then return 'has a malformed count of attempts' end
      if partial and not read_record(partial) then return 'has a malformed record of a partial' end
      if record then num_found = num_found + 1 end
    end
  end
  if num_found ~= num_stored then return 'counts ' .. num_stored .. ' stored members, and lists ' .. num_found end
end

local function flaw_of_complete(group, state)
  if whole(group[2]) ~= whole(group[1]) then return 'has ' .. group[2] .. ' of ' .. group[1] .. ' members' end
  if not whole(group[8]) then return 'has a missing or malformed newest policy version' end
  if group[13] and not whole(group[13]) then return 'has a malformed count of judgings' end
  if state == 'judging' then
    return group[12] and 'is judged already' or group[14] and not whole(group[14]) and 'has a malformed fence' or nil
  end
  if group[11] and not group[12] then return 'was not judged' end
  if not may_be_followed(group[7]) then return 'has a missing or malformed order of finishing' end
end

-- What is wrong with a group in `state`; nil if it is sound. Verbs never write such a group: a person, a hostile actor
-- or failing memory did.
local function flaw(id, state)
  if not whole(id) then return 'is not a group id' end
  local group = or_nothing(redis.pcall('HMGET', group_key(id), 'num_members', 'num_stored', 'max_attempts', 'opened_ms',
    'changed_ms', 'ticket', 'finished', 'newest_policy_version', 'fence', 'uses', 'is_judged', 'verdict',
    'num_judgings', 'judge_fence'))
  if not group then return 'is stored in a key of another type' end
  for i, name in ipairs({ 'num_members', 'num_stored', 'max_attempts', 'opened_ms', 'changed_ms' }) do
    if not whole(group[i]) then return (group[i] and 'has a malformed ' or 'lacks ') .. name end
  end
  local num_members = tonumber(group[1])
  if num_members < 1 or num_members > MAX_MEMBERS then return 'has ' .. group[1] .. ' members' end
  if not group[6] then return 'lacks its ticket' end
  local uses = group[10] or ''
  if string.gsub(uses, '%d+,', '') ~= '' or string.find(uses, TOO_LONG) then return 'has uses that are not steps' end
  if state == 'leased' and not whole(group[9]) then return 'has a missing or malformed fence' end
  if state == 'claimed' and not last_in(uses) then return 'is claimed for no step' end
  local complete = state == 'judging' or state == 'ready' or state == 'claimed'
  return flaw_of_members(id, num_members, tonumber(group[2])) or complete and flaw_of_complete(group, state) or nil
end

-- Raises DAMAGED for a damaged group before any change; the learner then repairs the books and calls the verb again.
local function must_be_sound(id, state)
  local what = flaw(id, state)
  if what then error('DAMAGED: group ' .. id .. ' ' .. what) end
end

-- Moves a damaged group after all others: an actor cannot repair the books and skips it, and the learner finds it
-- there.
local function set_back(id, state)
  redis.call('ZADD', base .. ':' .. state, '+inf', id)
end

-- The records of the stored members, by member.
local function stored_records(id)
  local records = {}
  for member = 0, size_of(id) - 1 do
    records[member] = redis.call('HGET', group_key(id), 'member:' .. member) or nil
  end
  return records
end

-- Adds the tokens, turns and durations of the records to `account`.
local function count_work(account, records)
  local sums = { 0, 0, 0 }
  for _, record in pairs(records) do
    local sizes = { string.match(record, '^%d+:%d+:%d+:%d+:(%d+):(%d+):(%d+):') }
    for i, size in ipairs(sizes) do sums[i] = sums[i] + size end
  end
  for i, name in ipairs({ 'tokens:', 'turns:', 'duration_ms:' }) do count(name .. account, sums[i]) end
end

-- Removes the partial of a missing member and counts it in `account`. The work of a resumed or superseded partial is
-- not counted here: it is part of a later trajectory.
local function remove_partial(id, member, account)
  local record = redis.call('HGET', group_key(id), 'partial:' .. member)
  if not record then return end
  redis.call('UNLINK', payload_key('partial', id, member, record))
  redis.call('HDEL', group_key(id), 'partial:' .. member)
  count('partials:held', -1)
  count('partials:' .. account, 1)
  if account ~= 'resumed' and account ~= 'discarded:superseded' then count_work(account, { record }) end
end

-- Removes a group and its payloads, and counts its members in `account`.
local function remove_group(id, account)
  local group, records = group_key(id), stored_records(id)
  local num_stored = 0
  for member = 0, size_of(id) - 1 do
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

-- The next functions expect a group that has just left its state.

local function close(id, account)
  remove_group(id, account)
  count(account, 1)
end

-- Removes the uses by steps after `step`.
local function take_back(id, step)
  local uses, kept = uses_of(id), ''
  if uses == '' then return end
  for use in string.gmatch(uses, '%d+') do
    if tonumber(use) <= tonumber(step) then kept = kept .. use .. ',' end
  end
  redis.call('HSET', group_key(id), 'uses', kept)
end

-- Retires a group that a model has learned from: it becomes claimed for the step of its last use, and is settled with
-- it. Returns whether it did.
local function retired(id)
  local step = last_use(id)
  if step then enter(id, 'claimed', step) end
  return step ~= nil
end

local function drop(id, reason)
  if not retired(id) then close(id, 'dropped:' .. reason) end
end

-- Adds to the list of the last 100 failures.
local function note_failure(description)
  local failures = base .. ':failures'
  if not or_nothing(redis.pcall('LPUSH', failures, description)) then
    redis.call('DEL', failures)
    redis.call('LPUSH', failures, description)
  end
  redis.call('LTRIM', failures, 0, 99)
end
