-- judged: (group_id, fence, verdict) -> 'stored'; 'duplicate' if this call was made before and its reply was lost;
-- 'fenced' if the lease is lost. The group becomes ready.
local MAX_VERDICT = 16384 -- bytes for the judge's name, and for each member: marks of MAX_REWARDS parts
local id, group = ARGV[1], group_key(ARGV[1])
if or_nothing(redis.pcall('HGET', group, 'verdict_fence')) == ARGV[2] then
  count('dedup_hits', 1)
  return 'duplicate'
end
if not holds('judging', id, ARGV[2]) or flaw(id, 'judging') then
  count('fenced_verdicts', 1)
  return 'fenced'
end
if #ARGV[3] > MAX_VERDICT * (size_of(id) + 1) then return redis.error_reply('ERR malformed verdict') end
leave(id, 'judging')
redis.call('HSET', group, 'verdict', ARGV[3], 'verdict_fence', ARGV[2])
finish(id)
return 'stored'
