-- insert: (group_id, member, record), payload in KEYS[2]. Commits the payload that was SET just before, with a time to
-- live that ends here.
local id, member, record = ARGV[1], ARGV[2], ARGV[3]
local group = group_key(id)
local payload, attempt, fence, oldest = read_record(record)
if not payload then return redis.error_reply('ERR no record: ' .. record) end
-- One command for all that is asked of the group: this is the verb that servers spend their time on.
local facts = redis.call('HMGET', group, 'member:' .. member, 'fence', 'attempt:' .. member, 'partial:' .. member,
  'oldest_policy_version', 'num_stored', 'num_members')
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
if redis.call('PERSIST', KEYS[2]) == 0 then return 'full' end

local num_stored = (facts[6] or 0) + 1
redis.call('HSET', group, 'num_stored', num_stored, 'oldest_policy_version', math.min(oldest, facts[5] or oldest),
  'member:' .. member, record)
if partial then
  -- Handed in under an earlier lease, it was given out with this one; under this one, it was never needed.
  local _, _, handed_in_under = read_record(partial)
  remove_partial(id, member, handed_in_under == fence and 'discarded:superseded' or 'resumed')
end
count('trajectories:inserted', 1)
count('trajectories:held', 1)
if num_stored == tonumber(facts[7]) then
  redis.call('HSET', group, 'finished', redis.call('HINCRBY', counters, 'finished', 1))
  count_work('finished', stored_records(id))
  leave(id, 'leased')
  enter_ready(id)
end
return 'stored'
