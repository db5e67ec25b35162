-- enlist: a name in a set. Removing first, so that it works with maxmemory reached too: see begin.lua.
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('SADD', KEYS[1], ARGV[1])
