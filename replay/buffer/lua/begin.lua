-- At maxmemory, Redis lets a script continue to write after its first write. So every verb begins with a write that
-- changes nothing. The books still change, and the learner still takes groups, while new payloads (plain SETs) wait.
redis.call('PERSIST', counters)
