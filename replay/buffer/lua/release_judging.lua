-- release_judging: (group_id, fence). Another judge may lease the group at once; no judging is counted.
if holds('judging', ARGV[1], ARGV[2]) then
  redis.call('HDEL', group_key(ARGV[1]), unpack(LEASE.judging))
  redis.call('ZADD', base .. ':judging', now_ms(), ARGV[1])
end
