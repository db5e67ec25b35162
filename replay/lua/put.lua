-- put: (value, then seconds to live if it is not for good). A notice: see notice.py. Deleting first, so that it works
-- with maxmemory reached too: see begin.lua.
redis.call('DEL', KEYS[1])
redis.call('SADD', KEYS[1], ARGV[1])
if ARGV[2] then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
