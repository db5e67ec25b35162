-- settle: (epoch, step, limit) -> how many. Claims of steps up to `step` are in a durable checkpoint: trained, for
-- good.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local ids = redis.call('ZRANGEBYSCORE', base .. ':claimed', '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
for _, id in ipairs(ids) do
  leave(id, 'claimed')
  close(id, 'trained')
end
return #ids
