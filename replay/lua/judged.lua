-- judged: (group_id, fence, verdict) -> 'stored'; 'duplicate' if this call was made before and its reply was lost;
-- 'fenced' if the lease is lost. The group becomes ready.
local id, group = ARGV[1], group_key(ARGV[1])
if or_nothing(redis.pcall('HGET', group, 'verdict_fence')) == ARGV[2] then
  count('dedup_hits', 1)
  return 'duplicate'
end
if not judges(id, ARGV[2]) or flaw(id, 'judging') then
  count('fenced_verdicts', 1)
  return 'fenced'
end
leave(id, 'judging')
redis.call('HSET', group, 'verdict', ARGV[3], 'verdict_fence', ARGV[2])
finish(id)
return 'stored'
