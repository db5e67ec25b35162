-- lease: (actor, request, ttl_ms) -> {fence, ticket, group id, num_members, number of groups that are still queued, then
-- for each missing member: member, attempt, record of its partial or ''; for each stored one: member, -1, its record} of the
-- oldest queued group; false if no group is queued. A request that is repeated because its reply was lost gets the same lease again.
cap_leases('leased', ARGV[3])
expire_leases()
local request = base .. ':lease_request:' .. ARGV[2]
local MAX_SKIPPED = 100 -- damaged groups in one call: other clients wait meanwhile

local function first_queued()
  for _ = 1, MAX_SKIPPED do
    local id = redis.call('ZRANGEBYSCORE', base .. ':queued', '-inf', '(+inf', 'LIMIT', 0, 1)[1]
    if not id or not flaw(id, 'queued') then return id end
    set_back(id, 'queued')
  end
end

local id = or_nothing(redis.pcall('GET', request))
if id then
  if flaw(id, 'leased') or redis.call('HGET', group_key(id), 'request') ~= ARGV[2] then return false end
else
  id = first_queued()
  if not id then return false end
  leave(id, 'queued')
  enter(id, 'leased', now_ms() + ARGV[3])
  redis.call('HSET', group_key(id), 'fence', next_fence(), 'actor', ARGV[1], 'request', ARGV[2])
  redis.call('SET', request, id, 'PX', ARGV[3])
end
local group = group_key(id)
local lease = redis.call('HMGET', group, 'fence', 'ticket')
lease[3], lease[4], lease[5] = id, size_of(id), redis.call('ZCARD', base .. ':queued')
for member = 0, lease[4] - 1 do
  local stored = redis.call('HGET', group, 'member:' .. member)
  lease[#lease + 1] = member
  lease[#lease + 1] = stored and -1 or tonumber(redis.call('HGET', group, 'attempt:' .. member) or '0')
  lease[#lease + 1] = stored or redis.call('HGET', group, 'partial:' .. member) or ''
end
return lease
