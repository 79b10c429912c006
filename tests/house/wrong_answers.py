"""Two wrong answers to each exercise of the course, with words of the message that names the mistake.

A row is the page, the exercise, lines of the cells that its check needs, the answer and the words.
"""

HIDE, NOTHING, RATE = "hide_and_predict", "nothing_is_happening", "rate_over_time"
LEARN, ONE_LABEL, OWN = "did_it_learn", "whole_text_one_label", "your_own_text"
PAID, PROCESSES, DAY = "every_token_paid_for", "two_processes_one_step", "from_lab_to_day"
RECORD = "record_in_an_afternoon"
FINAL, FINAL_NEEDS = "final_project", ("def verdict(our_scores", "import numpy as np")
WRONG_ANSWERS = [
    (FINAL, "verdict", FINAL_NEEDS, """def verdict(our_scores, their_scores):
    our_nats, their_nats = ([score.nats[0] for score in arm_scores] for arm_scores in (our_scores, their_scores))
    return "better" if np.mean(our_nats) < np.mean(their_nats) else "worse"
""", "or its luck"),
    (FINAL, "verdict", FINAL_NEEDS, """def verdict(our_scores, their_scores):
    if max(score.nats[2] for score in our_scores) < min(score.nats[1] for score in their_scores): return "better"
    return "worse" if min(score.nats[1] for score in our_scores) > max(score.nats[2] for score in their_scores) else "not known"
""",
     "row by row"),
    (HIDE, "gap_loss", ("def gap_loss",), """def gap_loss(z_BLV, labels_BL):
    asked_BL = labels_BL != -100
    return F.cross_entropy(z_BLV[asked_BL], labels_BL[asked_BL], reduction="sum") / labels_BL.numel()""",
     "divide by the number of labels"),
    (HIDE, "gap_loss", ("def gap_loss",), """def gap_loss(z_BLV, labels_BL):
    asked_BL = labels_BL != -100
    p_MV = z_BLV[asked_BL].exp() / z_BLV[asked_BL].exp().sum(-1, keepdim=True)
    return -p_MV.log()[torch.arange(len(p_MV)), labels_BL[asked_BL]].mean()""", "overflows"),
    (HIDE, "whole_words", ("def whole_words",), """def whole_words(continues, coins, share):
    return [coin < share for coin in coins]""", "its own coin"),
    (HIDE, "whole_words", ("def whole_words",), """def whole_words(continues, coins, share):
    return [not goes_on and coin < share for goes_on, coin in zip(continues, coins)]""", "go on with a hidden word"),
    (ONE_LABEL, "max_pool", ("def max_pool", "def mean_pool("), """def max_pool(x_BLD, mask_BL):
    return x_BLD.max(1).values""", "padding has a say"),
    (ONE_LABEL, "max_pool", ("def max_pool", "def mean_pool("), """def max_pool(x_BLD, mask_BL):
    return (x_BLD * mask_BL[..., None]).max(1).values""", "minus infinity"),
    (ONE_LABEL, "labels_needed", ("def labels_needed",), """def labels_needed(counts, scores, goal):
    return counts[0] if goal <= scores[0] else math.exp(np.interp(goal, scores, np.log(counts)))""", "never reached"),
    (ONE_LABEL, "labels_needed", ("def labels_needed",), """def labels_needed(counts, scores, goal):
    if scores[0] > goal:
        return counts[0]
    for place in range(1, len(counts)):
        low, high = scores[place - 1], scores[place]
        if high > goal:
            share = (goal - low) / (high - low)
            return counts[place - 1] * (counts[place] / counts[place - 1]) ** share
    return math.inf""", "equals the goal"),
    (PROCESSES, "cut_gated", ("def gated(",), """def cut_gated(expand, contract, rank, W):
    return expand.chunk(W, 1)[rank], contract.chunk(W, 0)[rank]""", "has no gates"),
    (PROCESSES, "cut_gated", ("def gated(",), """def cut_gated(expand, contract, rank, W):
    value, gate = (half.chunk(W, 1)[rank] for half in expand.chunk(2, 1))
    return torch.cat([value, gate], 1), contract.chunk(W, 0)[1 - rank]""", "the same hidden unit"),
    (PROCESSES, "loss_for_ddp", ("def loss_for_ddp",), """def loss_for_ddp(loss_sum, labels_of_step, W):
    return loss_sum / labels_of_step""", "multiply by it"),
    (PROCESSES, "loss_for_ddp", ("def loss_for_ddp",), """def loss_for_ddp(loss_sum, labels_of_step, W):
    return loss_sum * W / labels_of_step / W * W / 4""", "DDP gets"),
    (DAY, "exponent_of", ("def exponent_of",), """def exponent_of(best):
    budgets, sizes = np.log(np.array(best)).T
    return np.polyfit(sizes, budgets, 1)[0]""", "turn it round"),
    (DAY, "exponent_of", ("def exponent_of",), """def exponent_of(best):
    (c0, n0), (c1, n1) = best[:2]
    return math.log(n1 / n0) / math.log(c1 / c0)""", "two points are not all"),
    (DAY, "steps_left", ("def steps_left",), """def steps_left(hours, seconds_per_step, every, pause):
    return int(hours * 3600 / seconds_per_step)""", "pauses take time"),
    (DAY, "steps_left", ("def steps_left",), """def steps_left(hours, seconds_per_step, every, pause):
    rounds, rest = divmod(hours * 3600, every * seconds_per_step + pause)
    return int(rounds * every + min(every, rest / seconds_per_step))""", "save at the end"),
    (RECORD, "predicted_gain", ("def predicted_gain",), """def predicted_gain():
    return -0.1, 0.4""", "choose a side of 0"),
    (RECORD, "predicted_gain", ("def predicted_gain",), """def predicted_gain():
    return 0, 5""", "no run could contradict"),
    (RECORD, "fair_gain", ("def fair_gain",), """def fair_gain(losses):
    control, idea = (min(min(seeds) for seeds in found.values()) for found in losses.values())
    return control - idea""", "the best single seed is luck"),
    (RECORD, "fair_gain", ("def fair_gain",), """def fair_gain(losses):
    control, idea = (min(np.mean(seeds) for seeds in found.values()) for found in losses.values())
    return control - idea""", "a best rate at an end"),
    ("three_minutes", "right_share", ("def right_share",), """def right_share(labels, guesses):
    return float((guesses == labels)[labels != -100].sum())""", "two of the four labels"),
    ("three_minutes", "right_share", ("def right_share",), """def right_share(labels, guesses):
    return float((guesses == labels)[labels > 0].mean())""", "a token like any other"),
    ("optimizers", "nesterov", ("def nesterov", "def difference"), """def nesterov(w, g, state, lr, mu=0.9):
    state["m"] = mu * state.get("m", 0) + g
    return w - lr * state["m"]""", "plain momentum"),
    ("optimizers", "nesterov", ("def nesterov", "def difference"), """def nesterov(w, g, state, lr, mu=0.9):
    state["m"] = mu * state.get("m", 0) + g
    return w - lr * mu * state["m"]""", "add the gradient"),
    ("words_and_pieces", "words_again", ("def words_again",), """def words_again(word_ids, guesses):
    return {word: guess for word, guess in zip(word_ids, guesses) if word is not None}""", "overwritten the first"),
    ("words_and_pieces", "words_again", ("def words_again",), """def words_again(word_ids, guesses):
    said = {}
    for word, guess in zip(word_ids, guesses):
        said.setdefault(word, guess)
    return said""", "of no word"),
    ("head_start", "rate_at", ("def rate_at",), """def rate_at(step, num_steps, rate, warmup):
    return rate * (step / warmup if step < warmup else max(0, num_steps - step) / num_steps)""", "warmup's end"),
    ("head_start", "rate_at", ("def rate_at",), """def rate_at(step, num_steps, rate, warmup):
    return min(rate * step / warmup, rate * max(0, num_steps - step) / (num_steps - warmup))""", "divides by 0"),
    ("where_is_the_answer", "to_characters", ("def to_characters",), """def to_characters(text, start):
    return start""", "ë has two bytes"),
    ("where_is_the_answer", "to_characters", ("def to_characters",), """def to_characters(text, start):
    return len(text.encode()[:start].decode(errors="ignore"))""", "inside ë"),
    ("one_sentence_one_vector", "loss_without_twins", ("def loss_by_hand", "def loss_without_twins"),
     """def loss_without_twins(cosines_QQ, documents, temperature):
    return loss_by_hand(cosines_QQ, temperature)""", "the twin still counts"),
    ("one_sentence_one_vector", "loss_without_twins", ("def loss_by_hand", "def loss_without_twins"),
     """def loss_without_twins(cosines_QQ, documents, temperature):
    same_QQ = torch.tensor([[a == b for b in documents] for a in documents])
    scaled_QQ = (cosines_QQ / temperature)
    others_QQ = scaled_QQ.masked_fill(same_QQ, -math.inf)
    return (others_QQ.exp().sum(1).log() - scaled_QQ.diagonal()).mean()""", "must stay in the sum"),
    ("writing_by_unmasking", "broken_share", ("def broken_share",), """def broken_share(joint):
    return np.abs(joint - np.outer(joint.sum(1), joint.sum(0))).sum()""", "half the sum"),
    ("writing_by_unmasking", "broken_share", ("def broken_share",), """def broken_share(joint):
    return np.abs(joint - joint.mean()).sum() / 2""", "outer product"),
    (RATE, "faults", ("def faults", "def make_schedule"), """def faults(schedule, num_steps):
    factors = [schedule(step) for step in range(num_steps)]
    return ["jump up"] * any(b - a > 0.1 for a, b in zip(factors, factors[1:])) + ["first step lost"] * (
        factors[0] == 0) + ["above 1"] * (max(factors) > 1)""", "0.2 is allowed"),
    (RATE, "faults", ("def faults", "def make_schedule"), """def faults(schedule, num_steps):
    factors = [schedule(step) for step in range(num_steps)]
    return ["jump up" for a, b in zip(factors, factors[1:]) if b - a > 0.2] + ["first step lost"] * (
        factors[0] == 0) + ["above 1"] * (max(factors) > 1)""", "each fault once"),
    (RATE, "best_rate_now", ("def best_rate_now",), """def best_rate_now(v, h, noise):
    return 1 / h""", "without noise"),
    (RATE, "best_rate_now", ("def best_rate_now",), """def best_rate_now(v, h, noise):
    return v / (v + noise)""", "h = 1 only"),
    (OWN, "who_is_next", ("def who_is_next",), """def who_is_next(given, shares):
    return min(shares, key=lambda name: (given[name] + 1) / shares[name])""", "gives the fifth row"),
    (OWN, "who_is_next", ("def who_is_next",), """def who_is_next(given, shares):
    total = max(1, sum(given.values()))
    return max(shares, key=lambda name: shares[name] - given[name] / total)""", "gives the fifth row"),
    (OWN, "forgotten", ("def forgotten",), """def forgotten(before, after, line):
    return (after - before) / before""", "against the line"),
    (OWN, "forgotten", ("def forgotten",), """def forgotten(before, after, line):
    return (after - before) / (line - before)""", "math.nan"),
    (PAID, "may_look", ("def may_look",), """def may_look(documents):
    return documents[:, None] == documents""", "padding is no document"),
    (PAID, "may_look", ("def may_look",), """def may_look(documents):
    return (documents[:, None] == documents) & (documents > 0)""", "nan"),
    (PAID, "useful_share", ("def useful_share",), """def useful_share(lengths, rows, capacity):
    return sum(lengths) / (len(rows) * capacity)""", "n * n pairs"),
    (PAID, "useful_share", ("def useful_share",), """def useful_share(lengths, rows, capacity):
    needed = sum(lengths[n] ** 2 for row in rows for n in row)
    return needed / sum(sum(lengths[n] for n in row) ** 2 for row in rows)""", "padding is computed too"),
    (NOTHING, "asleep", ("L, GAP =", "def loss_of", "def asleep"), """def asleep(model, batches):
    loss_of(model, *batches[0]).backward()
    return sorted(name for name, p in model.named_parameters() if p.grad is None or not p.grad.any())""",
     "look at all of them"),
    (NOTHING, "asleep", ("L, GAP =", "def loss_of", "def asleep"), """def asleep(model, batches):
    for batch in batches:
        loss_of(model, *batch).backward()
    return sorted(name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any())""",
     "as dead as one of zeros"),
    (NOTHING, "rate_from", ("def rate_from",), """def rate_from(rates, losses):
    return rates[10:][np.nanargmin(losses[10:])] / 10""", "one lucky batch"),
    (NOTHING, "rate_from", ("def rate_from",), """def rate_from(rates, losses):
    finite = np.isfinite(losses)
    return rates[finite][smooth(losses[finite], 10)[10:].argmin() + 10]""", "take a tenth"),
    (LEARN, "better", ("def interval", "def better"), """def better(a_M, b_M, doc_M, rounds=2000):
    return interval(b_M - a_M, doc_M, rounds)""", "a - b"),
    (LEARN, "better", ("def interval", "def better"), """def better(a_M, b_M, doc_M, rounds=2000):
    sums, counts = np.bincount(doc_M, a_M - b_M), np.bincount(doc_M)
    draws = np.random.default_rng(1).integers(len(sums), size=(rounds, len(sums)))
    return np.quantile(sums[draws].sum(1) / counts[draws].sum(1), (0.05, 0.95))""", "0.025 and 0.975"),
    (LEARN, "cool", ("def cool",), """def cool(scores_MV, truth_M):
    tried = np.geomspace(0.25, 4, 81)
    return 1 / min(tried, key=lambda t: F.cross_entropy(scores_MV / t, truth_M).item())""", "not multiplied"),
    (LEARN, "cool", ("def cool",), """def cool(scores_MV, truth_M):
    return 0.25""", "the coldest is the surest"),
    ("inside_the_encoder", "masked_weights", ("def attend(", "def masked_weights"), """def masked_weights(q, k, real):
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    return weights * real[:, None, :]""", "before the softmax"),
    ("inside_the_encoder", "find_number", ("NAMES, NUMBERS, CARDS", "def find_number"), """def find_number(names, numbers):
    keys = F.one_hot(names, len(NAMES)).float()
    weights = (100 * keys @ keys[numbers == HIDDEN][0]).softmax(-1)
    return (weights @ numbers.float()).round()""", "hears itself"),
    ("backward_by_hand", "rms_norm_backward", ("def rms_norm_backward",), """def rms_norm_backward(x, dy):
    return dy / x.square().mean(-1, keepdim=True).sqrt()""", "treats it as a constant"),
    ("backward_by_hand", "rms_norm_backward", ("def rms_norm_backward",), """def rms_norm_backward(x, dy):
    root = x.square().mean(-1, keepdim=True).sqrt()
    return (dy - x / root * (dy * x / root).sum(-1, keepdim=True)) / root""", "a mean over the axis"),
    ("electra_by_hand", "sample_wrong", ("def sample_wrong",), """def sample_wrong(z_MV, truth_M, draw):
    z_MV.scatter_(1, truth_M[:, None], -math.inf)
    return torch.multinomial(z_MV.softmax(-1), 1, generator=draw)[:, 0]""", "the scores have changed"),
    ("electra_by_hand", "sample_wrong", ("def sample_wrong",), """def sample_wrong(z_MV, truth_M, draw):
    return torch.multinomial(z_MV.softmax(-1), 1, generator=draw)[:, 0]""", "the true letter"),
    ("real_encoder", "moved_pieces", ("def moved_pieces",), """def moved_pieces(ours, theirs):
    return {piece for piece in ours if ours[piece] != theirs.get(piece)}""", "missing, not moved"),
    ("real_encoder", "moved_pieces", ("def moved_pieces",), """def moved_pieces(ours, theirs):
    return ours.keys() & theirs.keys()""", "has not moved"),
    ("names_in_text", "sort_mistakes", ("def sort_mistakes",), """def sort_mistakes(found, true):
    overlap = lambda a, b: a[2] == b[2] and a[0] <= b[1] and b[0] <= a[1]
    return Counter("right" if t in found else "border" if any(overlap(t, f) for f in found) else "missed" for t in true)
""", "only touch"),
    ("names_in_text", "sort_mistakes", ("def sort_mistakes",), """def sort_mistakes(found, true):
    overlap = lambda a, b: a[2] == b[2] and a[0] < b[1] and b[0] < a[1]
    return Counter("right" if t in found else "border" if any(overlap(t, f) for f in found) else "missed" for t in true)
""", "another type"),
    ("the_field", "attend", ("def attend",), """def attend(x_LD, at):
    return (x_LD @ x_LD[at]).softmax(0) @ x_LD""", "square root of D"),
    ("the_field", "attend", ("def attend",), """def attend(x_LD, at):
    return x_LD.mean(0)""", "same share"),
    ("smaller_and_faster", "quantize_symmetric", ("def quantize_symmetric",), """def quantize_symmetric(w):
    scale = w.abs().max() / 127
    return (w / scale).round().to(torch.int8), scale""", "a scale for each row"),
    ("smaller_and_faster", "quantize_symmetric", ("def quantize_symmetric",), """def quantize_symmetric(w):
    scales = (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return (w / scales).round(), scales""", "must be int8"),
    ("look_inside", "gradient_times_input", ("def gradient_times_input",), """def gradient_times_input(f, x_LD):
    x_LD = x_LD.detach().requires_grad_()
    return torch.autograd.grad(f(x_LD), x_LD)[0].sum(-1)""", "multiply it by the vector"),
    ("look_inside", "gradient_times_input", ("def gradient_times_input",), """def gradient_times_input(f, x_LD):
    x_LD = x_LD.detach().requires_grad_()
    return (torch.autograd.grad(f(x_LD), x_LD)[0] * x_LD).abs().sum(-1).detach()""", "keep the signs"),
    ("long_documents", "mask_with_global", ("def mask_with_global",), """def mask_with_global(length, window, positions):
    at_L = torch.arange(length)
    mask_LL = (at_L[:, None] - at_L).abs() <= window
    mask_LL[positions] = True
    return mask_LL""", "its column is True"),
    ("long_documents", "mask_with_global", ("def mask_with_global",), """def mask_with_global(length, window, positions):
    at_L = torch.arange(length)
    mask_LL = (at_L[:, None] - at_L).abs() <= 2 * window
    mask_LL[positions] = True
    mask_LL[:, positions] = True
    return mask_LL""", "one letter to each side"),
    ("whose_text", "redact", ("def redact",), """def redact(text):
    text = re.sub(r"[\\w.+-]+@[\\w-]+(?:\\.[\\w-]+)+", "<EMAIL>", text)
    return re.sub(r"\\+?\\d{7,}", "<PHONE>", text)""", "number in groups"),
    ("whose_text", "redact", ("def redact",), """def redact(text):
    text = re.sub(r"[\\w.+-]+@[\\w-]+(?:\\.[\\w-]+)+", "<EMAIL>", text)
    return re.sub(r"\\+?\\d[\\d .-]*\\d", "<PHONE>", text)""", "fewer than seven digits"),
    ("torch_refresher", "gradients", ("def gradients",), """def gradients(forget):
    a, b = (torch.zeros((), requires_grad=True) for _ in range(2))
    (a * words_N + b - chars_N).square().mean().backward()
    return a.grad.item()""", "add up"),
    ("from_letters_to_pieces", "likeliest_pair", ("def likeliest_pair",), """def likeliest_pair(words):
    pairs = Counter()
    for pieces, times in words.items():
        for pair in zip(pieces, pieces[1:]): pairs[pair] += times
    return min(pairs, key=lambda pair: (-pairs[pair], pair))""", "divide by its parts"),
    ("from_letters_to_pieces", "likeliest_pair", ("def likeliest_pair",), """def likeliest_pair(words):
    parts = Counter(piece for pieces in words for piece in pieces)
    pairs = Counter(pair for pieces in words for pair in zip(pieces, pieces[1:]))
    return min(pairs, key=lambda pair: (-pairs[pair] / (parts[pair[0]] * parts[pair[1]]), pair))""", "as often as it occurs"),
    ("from_letters_to_pieces", "price", ("def price",), """def price(nats, pieces):
    return sum(nats) / math.log(2) / len("".join(pieces))""", "two bytes each"),
    ("from_letters_to_pieces", "price", ("def price",), """def price(nats, pieces):
    return np.mean([cost / math.log(2) / len(piece.encode()) for cost, piece in zip(nats, pieces)])""", "add up first"),
]  # fmt: skip
