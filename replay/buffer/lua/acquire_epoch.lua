-- acquire_epoch: (request, seconds to remember it) -> the new epoch; from now on, learners with an older epoch are
-- refused. A request that is repeated because its reply was lost gets the same epoch again.
local request = epoch_key .. ':request:' .. ARGV[1]
local epoch = whole(or_nothing(redis.pcall('GET', request)))
if not epoch then
  local last = or_nothing(redis.pcall('GET', epoch_key))
  -- Not below the clock: so it is above every earlier epoch too if the stored one is malformed, or was lost by a server
  -- that came back empty or without its newest writes.
  epoch = math.max(may_be_followed(last) and last + 1 or 0, now_ms())
  redis.call('SET', epoch_key, epoch)
  redis.call('SET', request, epoch, 'EX', ARGV[2])
end
return epoch
