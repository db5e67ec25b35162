-- announce: (learner epoch, policy version, root). KEYS: epoch, latest's version, latest, staged offer. A learner that
-- comes back may offer the version it left off with again, from a new address; other bytes under that number are refused.
-- This also makes a retried call harmless.
local newest_epoch = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) < newest_epoch then
  redis.call('DEL', KEYS[4])
  return 'the learner of epoch ' .. newest_epoch .. ' has taken over from epoch ' .. ARGV[1]
end
local latest = redis.call('HMGET', KEYS[2], 'policy_version', 'root')
local version = tonumber(latest[1] or '-1')
if tonumber(ARGV[2]) < version or (tonumber(ARGV[2]) == version and ARGV[3] ~= latest[2]) then
  redis.call('DEL', KEYS[4])
  return 'version ' .. version .. ' is offered already; ' .. ARGV[2] .. ' is not newer'
end
if redis.call('EXISTS', KEYS[4]) == 1 then
  redis.call('RENAME', KEYS[4], KEYS[3])
  redis.call('PERSIST', KEYS[3])
  redis.call('HSET', KEYS[2], 'policy_version', ARGV[2], 'root', ARGV[3])
elseif tonumber(ARGV[2]) > version then
  return redis.error_reply('ERR the offer of version ' .. ARGV[2] .. ' is gone: this server never had it, or lost it')
end
return ''
