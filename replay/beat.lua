-- beat: (name, member, ttl_ms). Deleting first, so that it works with maxmemory reached too: see prelude.lua.
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[1])
