-- acquire_epoch: (request, seconds to remember it) -> the new epoch; from now on, learners with an older epoch are
-- refused. A request that is repeated because its reply was lost gets the same epoch again.
local request = epoch_key .. ':request:' .. ARGV[1]
local epoch = whole(or_nothing(redis.pcall('GET', request)))
if not epoch then
  local last = or_nothing(redis.pcall('GET', epoch_key))
  -- If the stored epoch is malformed, start from the clock: its seconds are above every earlier epoch.
  if last ~= false and not may_be_followed(last) then redis.call('SET', epoch_key, redis.call('TIME')[1]) end
  epoch = redis.call('INCR', epoch_key)
  redis.call('SET', request, epoch, 'EX', ARGV[2])
end
return epoch
