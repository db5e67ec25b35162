-- hand_in: (group_id, member, attempt, fence, oldest_policy_version, num_bytes, num_tokens, num_turns, duration_ms,
-- actor), payload in KEYS[2]. Commits a partial that was SET just before; the member is still missing, and the next lease
-- gives the partial out.
local id, member, attempt, fence = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local group = group_key(id)
local payload = attempt .. ':' .. fence
local held = redis.call('HGET', group, 'partial:' .. member)
if held and string.match(held, '^%d+:%d+') == payload then
  count('dedup_hits', 1)
  return 'duplicate'
end
local stored = redis.call('HEXISTS', group, 'member:' .. member) == 1
if stored or not holds(id, fence) or (redis.call('HGET', group, 'attempt:' .. member) or '0') ~= attempt then
  redis.call('UNLINK', KEYS[2])
  count('fenced_inserts', 1)
  return 'fenced'
end
if redis.call('PERSIST', KEYS[2]) == 0 then return 'full' end

remove_partial(id, member, 'discarded:superseded')
redis.call('HSET', group, 'partial:' .. member, payload .. ':' .. table.concat(ARGV, ':', 5, 10))
count('partials:handed_in', 1)
count('partials:held', 1)
return 'stored'
