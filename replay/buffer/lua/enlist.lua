-- enlist: (name). Adds it to a set. It removes first, so that it works at maxmemory too: see begin.lua.
redis.call('SREM', KEYS[1], ARGV[1])
redis.call('SADD', KEYS[1], ARGV[1])
