-- insert: (group_id, member, attempt, fence, oldest_policy_version, num_bytes, num_tokens, num_turns, duration_ms,
-- actor), payload in KEYS[2]. Commits the payload that was SET just before, with a time to live that ends here.
local id, member, attempt, fence, oldest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local group = group_key(id)
local payload = attempt .. ':' .. fence
local stored = redis.call('HGET', group, 'member:' .. member)
if stored and string.match(stored, '^%d+:%d+') == payload then
  count('dedup_hits', 1)
  return 'duplicate'
end
if stored or not holds(id, fence) or (redis.call('HGET', group, 'attempt:' .. member) or '0') ~= attempt then
  redis.call('UNLINK', KEYS[2])
  count('fenced_inserts', 1)
  return 'fenced'
end
if redis.call('PERSIST', KEYS[2]) == 0 then return 'full' end

redis.call('HSET', group, 'member:' .. member, payload .. ':' .. oldest .. ':' .. table.concat(ARGV, ':', 6, 10))
local partial = redis.call('HGET', group, 'partial:' .. member)
if partial then
  -- Handed in under an earlier lease, it was given out with this one; under this one, it was never needed.
  local superseded = string.match(partial, '^%d+:(%d+)') == fence
  remove_partial(id, member, superseded and 'discarded:superseded' or 'resumed')
end
count('trajectories:inserted', 1)
count('trajectories:held', 1)
local oldest_so_far = tonumber(redis.call('HGET', group, 'oldest_policy_version') or oldest)
redis.call('HSET', group, 'oldest_policy_version', math.min(oldest, oldest_so_far))
if redis.call('HINCRBY', group, 'num_stored', 1) == tonumber(redis.call('HGET', group, 'num_members')) then
  redis.call('HSET', group, 'finished', redis.call('HINCRBY', counters, 'finished', 1))
  count_work('finished', stored_records(id))
  leave(id, 'leased')
  enter_ready(id)
end
return 'stored'
