-- hand_in: (group_id, member, record), payload in KEYS[2]. Commits a partial that was SET just before. The member stays
-- missing, and the next lease includes the partial.
local id, member, record = ARGV[1], ARGV[2], ARGV[3]
local group = group_key(id)
local payload, attempt, fence = read_record(record)
if not payload then return redis.error_reply('ERR malformed record') end
local held = or_nothing(redis.pcall('HGET', group, 'partial:' .. member))
if held and read_record(held) == payload then
  count('dedup_hits', 1)
  return 'duplicate'
end
local stored = redis.call('HEXISTS', group, 'member:' .. member) == 1
if stored or not holds('leased', id, fence) or (redis.call('HGET', group, 'attempt:' .. member) or '0') ~= attempt then
  redis.call('UNLINK', KEYS[2])
  count('fenced_inserts', 1)
  return 'fenced'
end
if not is_member(member, size_of(id)) then return redis.error_reply('ERR malformed member') end
if redis.call('PERSIST', KEYS[2]) == 0 then return 'full' end

remove_partial(id, member, 'discarded:superseded')
redis.call('HSET', group, 'partial:' .. member, record)
count('partials:handed_in', 1)
count('partials:held', 1)
return 'stored'
