-- settle: (epoch, step, limit) -> how many. Groups claimed for steps up to `step` are trained: their checkpoint is
-- durable.
local refusal = fenced_out(ARGV[1])
if refusal then return refusal end
local ids = redis.call('ZRANGEBYSCORE', base .. ':claimed', '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
for _, id in ipairs(ids) do
  must_be_sound(id, 'claimed')
  leave(id, 'claimed')
  close(id, 'trained')
end
return #ids
