-- announce: (learner epoch, policy version, root) -> why the offer is refused, or ''. KEYS: epoch, version of latest,
-- latest, staged offer, versions of latest: a stream whose only entry has the version in its id. A resumed learner may
-- offer its last version again from a new address, and a call may be retried: the same version is accepted if its root
-- is the same. Malformed keys read as missing: the next claim reports a malformed epoch, and this call replaces a
-- malformed version.
local known_epoch, latest = redis.pcall('GET', KEYS[1]), redis.pcall('HMGET', KEYS[2], 'policy_version', 'root')
local newest_epoch = type(known_epoch) == 'string' and tonumber(known_epoch) or 0
if latest.err then
  redis.call('DEL', KEYS[2])
  latest = {}
end
if tonumber(ARGV[1]) < newest_epoch then
  redis.call('DEL', KEYS[4])
  return 'the learner of epoch ' .. newest_epoch .. ' has taken over from epoch ' .. ARGV[1]
end
local version = latest[1] and #latest[1] < 15 and tonumber(latest[1]) or -1
if tonumber(ARGV[2]) < version or (tonumber(ARGV[2]) == version and ARGV[3] ~= latest[2]) then
  redis.call('DEL', KEYS[4])
  return 'version ' .. version .. ' is on offer already, and version ' .. ARGV[2] .. ' is not newer'
end
if redis.call('EXISTS', KEYS[4]) == 1 then
  redis.call('RENAME', KEYS[4], KEYS[3])
  redis.call('PERSIST', KEYS[3])
  redis.call('DEL', KEYS[5])
  redis.call('XADD', KEYS[5], ARGV[2] .. '-1', 'version', ARGV[2])
  redis.call('HSET', KEYS[2], 'policy_version', ARGV[2], 'root', ARGV[3])
elseif tonumber(ARGV[2]) > version then
  return redis.error_reply('ERR the staged offer of version ' .. ARGV[2] .. ' is missing: this server has lost it')
end
return ''
