-- acquire_epoch: (request, seconds to remember it) -> the new epoch; from now on every learner with an older one is
-- refused. A request that is repeated because its reply was lost gets the same epoch again.
local request = epoch_key .. ':request:' .. ARGV[1]
local epoch = redis.call('GET', request)
if not epoch then
  epoch = redis.call('INCR', epoch_key)
  redis.call('SET', request, epoch, 'EX', ARGV[2])
end
return tonumber(epoch)
