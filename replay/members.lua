-- members: the records of those whose deadline has not passed.
local time = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', time[1] * 1000 + math.floor(time[2] / 1000))
local names = redis.call('ZRANGE', KEYS[2], 0, -1)
if #names == 0 then return {} end
return redis.call('HMGET', KEYS[1], unpack(names))
