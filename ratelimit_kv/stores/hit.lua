-- Check all counters of a request, then charge all or none: algorithms.transact, run where the counters are.
--
-- KEYS     for each counter its key; for a sliding window also the key of the window before
-- ARGV[1]  "peek": read, no more
--          "fixed": fixed windows of one group without flags; then limit, cost and ttl of each
--          "hit": anything; then now, then the eleven arguments of each counter that are read below
--
-- The answer is what stood under each key before. The caller computes the verdicts from it with the function that this
-- script twins, so that every number has one source. A value that is not ours concerns its own counter alone: it is
-- passed over here, and answered as it stands or as the error that came of reading it.
--
-- Times are microseconds since the epoch. They and all counts stay below 2^53, so that doubles are as exact as the
-- twin's integers. The caller says what time it is: no TIME here, and a replica repeats nothing but plain writes.

local values = {}
for k = 1, #KEYS do
  values[k] = redis.pcall('GET', KEYS[k])
end
local mode = ARGV[1]
if mode == 'peek' then
  return values
end

local find, max, min = string.find, math.max, math.min
local MAX_COUNT = 9007199254740991

-- The integer in a text, nil when there is none.
local function integer(text)
  if text == '0' or (#text <= 16 and find(text, '^[1-9]%d*$')) then
    local number = tonumber(text)
    if number <= MAX_COUNT then
      return number
    end
  end
end

-- The count in a value: 0 when the key isn't there, nil when it holds something else.
local function count(value)
  if not value then
    return 0
  end
  return type(value) == 'string' and integer(value) or nil
end

-------------------------------------------------------------------------------------------------- the common case, short

if mode == 'fixed' then
  local counts = {}
  for k = 1, #KEYS do
    local used, cost = count(values[k]), tonumber(ARGV[3 * k])
    if used and cost > 0 and used + cost > tonumber(ARGV[3 * k - 1]) then
      return values
    end
    counts[k] = used
  end
  for k = 1, #KEYS do
    local cost = ARGV[3 * k]
    if counts[k] and cost ~= '0' then
      if values[k] then
        redis.call('INCRBY', KEYS[k], cost) -- the expiry is set once and never moved
      else
        redis.call('SET', KEYS[k], cost, 'EX', ARGV[3 * k + 1])
      end
    end
  end
  return values
end

------------------------------------------------------------------------------------------------------------ one counter

local now = tonumber(ARGV[2])

-- The integers in a text of ours, nil when it isn't one.
local function list(value)
  if type(value) ~= 'string' or #value > 65536 then
    return nil
  end
  local numbers = {}
  for part in string.gmatch(value .. ',', '([^,]*),') do
    local number = integer(part)
    if not number then
      return nil
    end
    numbers[#numbers + 1] = number
  end
  return numbers
end

-- How full a bucket is, in microseconds of refill.
local function filled(c)
  if not c.state or c.state <= now then
    return 0
  end
  local capacity, full = c.factor * c.limit, c.state - now
  return full <= 2 * capacity and full or capacity
end

local function in_flight(c)
  local flying = {}
  for _, at in ipairs(c.state or {}) do
    if now < at and at <= now + 2 * c.period then
      flying[#flying + 1] = at
    end
  end
  return flying
end

-- level, strikes, end of the ban, end of the last denied window
local function ban(c)
  local state = c.state
  if not state or now > max(state[3], state[4]) + c.maximum then
    return 0, 0, 0, 0
  end
  return state[1], state[2], min(state[3], now + c.maximum), state[4]
end

-- nil when the counter lets the hit through, else why not.
local function denial(c)
  if c.force then
    return nil
  end
  if c.kind == 'x' then
    local _, _, ends = ban(c)
    return ends > now and 'banned' or nil
  end
  if c.cost <= 0 then
    return nil
  end
  if c.cost > c.limit then
    return 'impossible'
  end
  local fits
  if c.kind == 'f' then
    fits = (c.state or 0) + c.cost <= c.limit
  elseif c.kind == 's' then
    local room = c.limit - (c.state or 0) - c.cost
    fits = room >= 0 and c.before * (c.ends - now) <= room * c.period
  elseif c.kind == 'b' then
    fits = filled(c) + c.cost * c.factor - c.limit * c.factor <= 0
  else
    fits = #in_flight(c) + c.cost <= c.limit
  end
  return not fits and 'over' or nil
end

local function write(c, value)
  if type(value) == 'table' then
    for i, number in ipairs(value) do
      value[i] = string.format('%.0f', number)
    end
    value = table.concat(value, ',')
  else
    value = string.format('%.0f', value)
  end
  redis.call('SET', c.key, value, 'EX', c.ttl)
end

local function add(c)
  local old = c.state or 0
  local new = min(max(old + c.cost, 0), MAX_COUNT)
  if not c.state then
    write(c, new)
  elseif new ~= old then
    redis.call('INCRBY', c.key, string.format('%.0f', new - old)) -- keeps the expiry
  end
end

local function charge(c)
  if c.cost == 0 or (c.existing and not c.state) then
    return false
  end
  if c.kind == 'b' then
    local full = now + filled(c) + c.cost * c.factor
    write(c, min(max(full, now), now + 2 * c.factor * c.limit))
  elseif c.kind == 'c' then
    local flying = in_flight(c)
    for _ = 1, c.cost do
      flying[#flying + 1] = c.ends
    end
    for _ = 1, -c.cost do
      local found
      for i, at in ipairs(flying) do
        if at == c.ends then
          found = i
          break
        end
      end
      if not found then
        break
      end
      table.remove(flying, found)
    end
    write(c, #flying > 0 and flying or 0)
  else
    add(c)
  end
  return true
end

-- Count a denied window that ends then, and ban when that was one too many. Whether it had not been counted yet.
local function strike(c, window_end)
  local level, strikes, ends, mark = ban(c)
  if (now < mark and mark <= window_end) or ends > now then
    return false
  end
  strikes = strikes + 1
  if strikes >= c.limit then
    level, strikes = level + 1, 0
    local length = c.period
    for _ = 2, level do
      length = length * c.factor
      if length >= c.maximum or c.factor == 1 then
        break
      end
    end
    ends = now + min(math.floor(length), c.maximum)
  end
  write(c, {level, strikes, ends, window_end})
  return true
end

----------------------------------------------------------------------------------------------------------- all of a hit

local counters, denied_groups, denied_scopes = {}, {}, {}
local k = 0
for a = 3, #ARGV, 11 do
  k = k + 1
  local flags = tonumber(ARGV[a + 6])
  local c = {
    key = KEYS[k],
    kind = ARGV[a],
    limit = tonumber(ARGV[a + 1]),
    cost = tonumber(ARGV[a + 2]),
    period = tonumber(ARGV[a + 3]),
    ends = tonumber(ARGV[a + 4]),
    ttl = ARGV[a + 5],
    count_denied = flags % 2 >= 1,
    deny_on_error = flags % 4 >= 2,
    force = flags % 8 >= 4,
    existing = flags % 16 >= 8,
    group = ARGV[a + 7],
    scope = ARGV[a + 8],
    factor = tonumber(ARGV[a + 9]), -- bucket: microseconds in which one hit comes back; ban: growth
    maximum = tonumber(ARGV[a + 10]),
  }
  local value = values[k]
  if value then
    if c.kind == 'c' or c.kind == 'x' then
      c.state = list(value)
    else
      c.state = count(value)
    end
    c.unreadable = not c.state or (c.kind == 'x' and #c.state ~= 4)
  end
  if c.kind == 's' then
    k = k + 1
    c.before = count(values[k])
    c.unreadable = c.unreadable or not c.before
  end
  if c.unreadable then
    if c.deny_on_error then
      denied_groups[c.group] = true
    end
  else
    c.denial = denial(c)
    if c.denial then
      denied_groups[c.group] = true
      local window_end = 0
      if c.denial == 'over' then
        window_end = (c.kind == 'f' or c.kind == 's') and c.ends or now + c.period
      end
      denied_scopes[c.scope] = max(denied_scopes[c.scope] or 0, window_end)
    end
  end
  counters[#counters + 1] = c
end

for _, c in ipairs(counters) do
  local window_end = denied_scopes[c.scope]
  if c.unreadable then
    -- passed over
  elseif c.kind == 'x' then
    if not (not c.denial and window_end and window_end > 0 and strike(c, window_end)) then
      if c.state and c.state[3] > now + c.maximum then
        write(c, {ban(c)}) -- heal, or it would never end before that clock comes
      end
    end
  else
    local charged = not denied_groups[c.group] or (c.count_denied and window_end)
    if not (charged and charge(c)) and c.kind == 'b' and c.state and c.state - now > 2 * c.factor * c.limit then
      write(c, now + filled(c)) -- heal, or it would stay clamped until the clock gets there
    end
  end
end
return values
