-- fail_judging: (group_id, fence, ms until the next judging, description) -> 1 if the group will be judged again; 0 if it
-- was dropped, or if the lease is lost, as it is when this call is repeated.
local id = ARGV[1]
local wait_ms = whole(ARGV[3])
if not wait_ms then return redis.error_reply('ERR malformed wait: ' .. ARGV[3]) end
if #ARGV[4] > MAX_DESCRIPTION then return redis.error_reply('ERR malformed description') end
if not holds('judging', id, ARGV[2]) or flaw(id, 'judging') then return 0 end
count('failed:judge_failed', 1)
note_failure(ARGV[4])
if not judged_in_vain(id) then return 0 end
redis.call('ZADD', base .. ':judging', now_ms() + wait_ms, id)
return 1
