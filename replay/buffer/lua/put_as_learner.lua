-- put_as_learner: (learner epoch, value) -> the epoch of a newer learner, and then nothing is written; else nothing.
-- KEYS: epoch, notice. Writes as put.lua does. A malformed epoch reads as missing: the next claim reports it.
local newest = redis.pcall('GET', KEYS[1])
newest = type(newest) == 'string' and #newest < 14 and string.find(newest, '^%d+$') and tonumber(newest) or 0
if tonumber(ARGV[1]) < newest then return newest end
redis.call('DEL', KEYS[2])
redis.call('SADD', KEYS[2], ARGV[2])
