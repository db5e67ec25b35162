-- beat: (name, member, ttl_ms) -> the number of members that are alive. It deletes first, so that it works at maxmemory
-- too: see begin.lua. A key of another type is deleted.
for i, kind in ipairs({ 'hash', 'zset' }) do
  if redis.call('TYPE', KEYS[i]).ok ~= kind then redis.call('DEL', KEYS[i]) end
end
local time = redis.call('TIME')
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms)
redis.call('ZADD', KEYS[2], now_ms + ARGV[3], ARGV[1])
-- A member that has died would otherwise stay as long as the server's clock was set back.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], now_ms + 10 * ARGV[3], '+inf')) do
  redis.call('ZADD', KEYS[2], now_ms + ARGV[3], name)
end
return redis.call('ZCARD', KEYS[2])
