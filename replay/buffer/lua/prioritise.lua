-- prioritise: (epoch, then group_id, score for each). Groups that are not ready are skipped.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
for i = 2, #ARGV, 2 do
  if redis.call('ZSCORE', base .. ':ready', ARGV[i]) then
    redis.call('HSET', group_key(ARGV[i]), 'score', ARGV[i + 1])
    redis.call('ZADD', base .. ':ready_by_score', 0 - ARGV[i + 1], place_among_scores(ARGV[i]))
  end
end
