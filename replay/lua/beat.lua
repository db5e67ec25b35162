-- beat: (name, member, ttl_ms). Deleting first, so that it works with maxmemory reached too: see begin.lua.
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms)
redis.call('ZADD', KEYS[2], now_ms + ARGV[3], ARGV[1])
