-- acquire_epoch: (request) -> the epoch; every learner with an older one is refused from now on. A request that is
-- repeated gets the same epoch again, also minutes after: else a learner would be fenced out by its own lost reply.
local request = KEYS[2] .. ':request:' .. ARGV[1]
local epoch = redis.call('GET', request)
if epoch then return tonumber(epoch) end
epoch = redis.call('INCR', KEYS[2])
redis.call('SET', request, epoch, 'EX', 1000)
return epoch
