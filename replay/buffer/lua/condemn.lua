-- condemn: (group_id, fence). Sets back a leased group whose actor cannot read its ticket; the learner's next repair
-- removes it.
if holds('leased', ARGV[1], ARGV[2]) then set_back(ARGV[1], 'leased') end
