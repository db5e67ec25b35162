-- members: -> the names of the members that have not expired. KEYS: records, times of expiry.
local time = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000), '+inf')
