-- reopen: (epoch, step, limit, number of the next claim) -> how many groups. Takes back the uses by steps after `step`,
-- which no checkpoint contains; the groups are ready again, in their old order. A request that arrives after the next
-- claim does nothing: it would take back uses that are valid.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local last_claim = or_nothing(redis.pcall('LRANGE', base .. ':last_claim', 0, 1)) or {}
if last_claim[1] == ARGV[1] and (whole(last_claim[2]) or -1) >= tonumber(ARGV[4]) then return 0 end
local num_reopened = 0
for state, used in pairs({ claimed = ':claimed', ready = ':ready_by_step' }) do
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. used, '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])) do
    must_be_sound(id, state)
    leave(id, state)
    take_back(id, ARGV[2])
    enter_ready(id)
    num_reopened = num_reopened + 1
  end
end
return num_reopened
