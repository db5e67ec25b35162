-- lease: (actor, request, ttl_ms) -> {fence, ticket, then member, attempt, record of its partial or '' for each missing
-- member} of the oldest queued group.
-- A request that is repeated because its reply was lost gets the same lease again.
expire_leases()
local request = base .. ':lease_request:' .. ARGV[2]
local id = redis.call('GET', request)
if id then
  if redis.call('HGET', group_key(id), 'request') ~= ARGV[2] then return false end
else
  id = redis.call('ZRANGE', base .. ':queued', 0, 0)[1]
  if not id then return false end
  leave(id, 'queued')
  enter(id, 'leased', now_ms() + ARGV[3])
  local fence = redis.call('HINCRBY', counters, 'last_fence', 1)
  redis.call('HSET', group_key(id), 'fence', fence, 'actor', ARGV[1], 'request', ARGV[2])
  redis.call('SET', request, id, 'PX', ARGV[3])
end
local group = group_key(id)
local lease = redis.call('HMGET', group, 'fence', 'ticket')
for member = 0, redis.call('HGET', group, 'num_members') - 1 do
  if redis.call('HEXISTS', group, 'member:' .. member) == 0 then
    lease[#lease + 1] = member
    lease[#lease + 1] = tonumber(redis.call('HGET', group, 'attempt:' .. member) or '0')
    lease[#lease + 1] = redis.call('HGET', group, 'partial:' .. member) or ''
  end
end
return lease
