-- With maxmemory reached, a script that has written may go on writing. So every verb begins with a write that changes
-- nothing: the books move and the learner drains while the payloads, which are plain SETs, wait.
redis.call('PERSIST', counters)
