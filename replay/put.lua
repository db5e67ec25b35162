-- put: a small value. Deleting first, so that it works with maxmemory reached too: see prelude.lua.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1])
