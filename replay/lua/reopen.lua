-- reopen: (epoch, step, limit, number of the next claim) -> how many. Uses for later steps are in no checkpoint: they
-- never were, and the groups are ready again, in their old order. A request that comes late, after that claim, would
-- take back what the learner has since learned from, and takes nothing.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local last_claim = redis.call('LRANGE', base .. ':last_claim', 0, 1)
if last_claim[1] == ARGV[1] and tonumber(last_claim[2]) >= tonumber(ARGV[4]) then return 0 end
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
