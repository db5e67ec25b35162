-- members: -> the names that have not expired. KEYS: times of expiry, as beat.lua writes them.
local time = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000), '+inf')
