-- put: (value, time to live in seconds or nothing). Writes a notice: see records.py. It deletes first, so that it works
-- at maxmemory too: see begin.lua.
redis.call('DEL', KEYS[1])
redis.call('SADD', KEYS[1], ARGV[1])
if ARGV[2] then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
