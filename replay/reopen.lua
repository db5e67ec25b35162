-- reopen: (epoch, step, limit) -> how many. Claims of later steps are in no checkpoint: ready again, in their old
-- order.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local ids = redis.call('ZRANGEBYSCORE', base .. ':claimed', '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])
for _, id in ipairs(ids) do
  leave(id, 'claimed')
  enter(id, 'ready', redis.call('HGET', group_key(id), 'finished'))
end
return #ids
