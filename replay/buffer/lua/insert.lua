-- insert: (group_id, member, record, environment, return, 1 for a success or else 0), payload in KEYS[2]. Commits the
-- payload that was SET just before, removes its time to live, and counts its episode as produced. The last member
-- completes the group.
local MAX_ENVIRONMENT = 256 -- bytes
local RESOLUTION = 1e-6 -- of returns, as RETURN_RESOLUTION in grpo.py
local id, member, record = ARGV[1], ARGV[2], ARGV[3]
local environment, total_reward, success = ARGV[4], ARGV[5], ARGV[6]
local group = group_key(id)
local payload, attempt, fence, newest = read_record(record)
if not payload then return redis.error_reply('ERR malformed record') end
-- Checked before any change: a script that fails half-way does not undo its changes.
local earned = tonumber(total_reward)
if not environment or #environment > MAX_ENVIRONMENT or not earned or earned - earned ~= 0
  or (success ~= '0' and success ~= '1') then
  return redis.error_reply('ERR malformed result: ' .. tostring(total_reward) .. ', ' .. tostring(success))
end
-- One command reads all fields: servers spend most of their time on this verb.
local facts = or_nothing(redis.pcall('HMGET', group, 'member:' .. member, 'fence', 'attempt:' .. member,
  'partial:' .. member, 'newest_policy_version', 'num_stored', 'num_members', 'lowest', 'highest', 'is_judged')) or {}
local stored, partial = facts[1], facts[4]
if stored and read_record(stored) == payload then
  count('dedup_hits', 1)
  return 'duplicate'
end
if stored or facts[2] ~= fence or (facts[3] or '0') ~= attempt then
  redis.call('UNLINK', KEYS[2])
  count('fenced_inserts', 1)
  return 'fenced'
end
if not is_member(member, size_of(id, facts[7])) then return redis.error_reply('ERR malformed member') end
if redis.call('PERSIST', KEYS[2]) == 0 then return 'full' end

local num_stored = (whole(facts[6]) or 0) + 1
local lowest, highest = math.min(tonumber(facts[8]) or earned, earned), math.max(tonumber(facts[9]) or earned, earned)
local sum = string.format('%.17g', earned)
redis.call('HSET', group, 'num_stored', num_stored, 'newest_policy_version', math.max(newest, whole(facts[5]) or newest),
  'member:' .. member, record, 'lowest', string.format('%.17g', lowest), 'highest', string.format('%.17g', highest))
if partial then
  -- A partial of an earlier lease came with this lease and was resumed; a partial of this lease was never needed.
  local _, _, handed_in_under = read_record(partial)
  remove_partial(id, member, handed_in_under == fence and 'discarded:superseded' or 'resumed')
end
count('trajectories:inserted', 1)
count('trajectories:held', 1)
count_work('produced', { record })
count('episodes:' .. environment, 1)
count('successes:' .. environment, success)
if redis.pcall('HINCRBYFLOAT', counters, 'returns:' .. environment, sum).err then -- as in count()
  redis.call('HSET', counters, 'returns:' .. environment, sum)
end
if num_stored == tonumber(facts[7]) then
  leave(id, 'leased')
  if facts[10] then -- its returns are not known before its verdict
    enter(id, 'judging', now_ms())
  else
    if highest - lowest <= RESOLUTION then redis.call('HSET', group, 'is_equal', 1) end
    finish(id)
  end
end
return 'stored'
