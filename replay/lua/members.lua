-- members: the records of those whose deadline has not passed.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local names = redis.call('ZRANGEBYSCORE', KEYS[2], now_ms, '+inf')
if #names == 0 then return {} end
return redis.call('HMGET', KEYS[1], unpack(names))
