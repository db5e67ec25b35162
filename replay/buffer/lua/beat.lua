-- beat: (name, ttl_ms, record or nothing) -> how many names are alive. Adds or renews a name, and removes those that have
-- expired. KEYS: times of expiry in ms, and the records if there are any. It deletes first, so that it works at maxmemory
-- too: see begin.lua. A key of another type is deleted.
for i, kind in ipairs({ 'zset', 'hash' }) do
  if KEYS[i] and redis.call('TYPE', KEYS[i]).ok ~= kind then redis.call('DEL', KEYS[i]) end
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
-- A member that has died would otherwise stay as long as the server's clock was set back.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now_ms + 10 * ARGV[2], '+inf')) do
  redis.call('ZADD', KEYS[1], now_ms + ARGV[2], name)
end
if KEYS[2] then redis.call('HSET', KEYS[2], ARGV[1], ARGV[3]) end
return redis.call('ZCARD', KEYS[1])
