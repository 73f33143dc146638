-- Writes a pod's record and lease, if its model fits the live verifiers' and there is room.
-- KEYS: pods, leases.  ARGV: pod id, record (JSON), lease ms, tier, model fingerprint, vocabulary fingerprint, most pods,
-- the LLM's identity.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id, tier, model, vocabulary = ARGV[1], ARGV[4], ARGV[5], ARGV[6]
if tier == 'verifier' or tier == 'speculator' then
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. string.format('%.0f', now), '+inf')) do
    local text = other ~= id and redis.call('HGET', KEYS[1], other)
    local ok, pod = pcall(cjson.decode, text or 'null')
    if ok and type(pod) == 'table' and pod.tier == 'verifier' then
      local theirs = tier == 'verifier' and pod.model_fingerprint or pod.vocab_fingerprint
      local ours = tier == 'verifier' and model or vocabulary
      if type(theirs) == 'string' and theirs ~= '' and ours ~= '' and theirs ~= ours then
        return { 'UNFIT', other, theirs, tier == 'verifier' and 'model' or 'vocabulary' }
      end
      local served, made_for = pod.llm_identity, ARGV[8]
      if tier == 'speculator' and type(served) == 'string' and served ~= '' and made_for ~= '' and served ~= made_for then
        return { 'UNFIT', other, served, 'llm' }
      end
    end
  end
end
if not redis.call('ZSCORE', KEYS[2], id) and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[7]) then
  return { 'FULL' }
end
redis.call('HSET', KEYS[1], id, ARGV[2])
redis.call('ZADD', KEYS[2], string.format('%.0f', now + ARGV[3]), id)
-- The keys outlive the longest lease in them, and vanish with the last pod.
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < ARGV[3] * 2 then
    redis.call('PEXPIRE', key, string.format('%.0f', ARGV[3] * 4))
  end
end
return { 'OK' }
