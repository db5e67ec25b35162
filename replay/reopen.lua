-- reopen: (epoch, step, limit, claims made before) -> how many. Uses for later steps are in no checkpoint: they never were, and the groups
-- are ready again, in their old order.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
if last_claim_number(ARGV[1]) >= tonumber(ARGV[4]) then return 0 end -- it comes late, and knows nothing of that claim
local num_reopened = 0
for state, used in pairs({ claimed = ':claimed', ready = ':ready_by_step' }) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. used, '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])) do
    leave(id, state)
    count('claims', 0 - take_back(id, ARGV[2]))
    enter_ready(id)
    num_reopened = num_reopened + 1
  end
end
return num_reopened
