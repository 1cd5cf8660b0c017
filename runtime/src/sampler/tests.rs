use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// Known answers of Random123 1.14 (`kat_vectors`, philox4x32, 10 rounds).
#[test]
fn philox_agrees_with_its_authors() {
    assert_eq!(philox([0; 2], [0; 4]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
    assert_eq!(
        philox([u32::MAX; 2], [u32::MAX; 4]),
        [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
    );
    assert_eq!(
        philox([0xa4093822, 0x299f31d0], [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344]),
        [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
    );
}

fn chosen(logits: &[f32], sampling: Sampling, position: u32) -> u32 {
    sample(logits, position, &sampling)
}

#[test]
fn temperature_zero_takes_the_lowest_id_of_the_largest() {
    let logits = [1.0, 3.0, f32::NEG_INFINITY, 3.0, f32::NAN, 2.0];
    for temperature in [0.0, 1e-45, 1e-39] {
        for seed in 0..100 {
            let sampling = Sampling { temperature, top_k: 4, top_p: 0.9, seed };
            assert_eq!(chosen(&logits, sampling, seed as u32), 1);
        }
    }
}

#[test]
fn masked_logits_are_never_drawn() {
    let mut logits = vec![f32::NEG_INFINITY; 300];
    (logits[7], logits[200]) = (-4.0, -5.0);
    for temperature in [1e-6, 1e-4, 1.0, 1e30] {
        for position in 0..200 {
            let sampling = Sampling { temperature, top_k: 0, top_p: 1.0, seed: 3 };
            let id = chosen(&logits, sampling, position);
            assert!(id == 7 || (temperature >= 1.0 && id == 200), "{id} at {temperature}");
        }
    }
    assert_eq!(
        chosen(&[f32::NEG_INFINITY; 4], Sampling { temperature: 1.0, ..Sampling::GREEDY }, 0),
        0
    );
    assert_eq!(
        chosen(&[0.0, f32::INFINITY], Sampling { temperature: 1.0, ..Sampling::GREEDY }, 0),
        1
    );
}

#[test]
fn uniform_numbers_lie_inside_the_interval() {
    let end = 2f64.powi(-53);
    for position in 0..100_000 {
        let u = uniform([5, 6], position);
        assert!(u >= end && u <= 1.0 - end);
    }
}

/// Upper 0.1 % point of χ² with `n` degrees of freedom (Wilson and Hilferty 1931).
fn critical(n: f64) -> f64 {
    n * (1.0 - 2.0 / (9.0 * n) + 3.0902 * (2.0 / (9.0 * n)).sqrt()).powi(3)
}

/// Probabilities by the definition of `Op::Sample`, over a full sort.
fn probabilities(logits: &[f32], sampling: &Sampling) -> HashMap<u32, f64> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    if sampling.top_k > 0 {
        ids.truncate(sampling.top_k as usize);
    }
    let weight =
        |id: &u32| (f64::from(logits[*id as usize]) / f64::from(sampling.temperature)).exp();
    let total: f64 = ids.iter().map(weight).sum();
    let mut mass = 0.0;
    let mut kept = HashMap::new();
    for id in ids {
        kept.insert(id, weight(&id) / total);
        mass += weight(&id) / total;
        if mass >= f64::from(sampling.top_p) {
            break;
        }
    }
    kept.values_mut().for_each(|p| *p /= mass);
    kept
}

#[test]
fn draws_have_the_distribution_of_the_definition() {
    let wide: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 / 15.0).collect();
    let narrow: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin() * 2.0).collect();
    let plain = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 42 };
    let usual = Sampling { temperature: 0.7, top_k: 64, top_p: 0.95, seed: 42 };
    for (logits, sampling) in [(&narrow, plain), (&narrow, usual), (&wide, usual)] {
        const DRAWS: u32 = 10_000;
        let expected = probabilities(logits, &sampling);
        let mut counts: HashMap<u32, f64> = HashMap::new();
        for position in 0..DRAWS {
            *counts.entry(chosen(logits, sampling, position)).or_default() += 1.0;
        }
        assert!(counts.keys().all(|id| expected.contains_key(id)));
        // Rare tokens share a bin, so that every bin is expected to have some draws.
        let mut bins: Vec<(f64, f64)> = Vec::new();
        let mut rare = (0.0, 0.0);
        for (id, p) in &expected {
            let bin = (p * f64::from(DRAWS), counts.get(id).copied().unwrap_or(0.0));
            if bin.0 < 60.0 {
                rare = (rare.0 + bin.0, rare.1 + bin.1);
            } else {
                bins.push(bin);
            }
        }
        if rare.0 > 0.0 {
            bins.push(rare);
        }
        assert!((5..=51).contains(&bins.len()), "{} bins", bins.len());
        let statistic: f64 = bins.iter().map(|(e, n)| (n - e).powi(2) / e).sum();
        assert!(statistic < critical(bins.len() as f64 - 1.0), "χ² = {statistic}");
    }
}

proptest! {
    #[test]
    fn a_drawn_token_is_one_that_the_definition_allows(
        logits in proptest::collection::vec(-20.0f32..20.0, 1..400),
        temperature in 0.05f32..3.0,
        top_k in 0u32..100,
        top_p in 0.05f32..1.0,
        seed in any::<u64>(),
        position in any::<u32>(),
    ) {
        let sampling = Sampling { temperature, top_k, top_p, seed };
        let id = chosen(&logits, sampling, position);
        let allowed = probabilities(&logits, &sampling);
        // Sums in another order may end the mass one token later.
        let least = allowed.keys().map(|id| logits[*id as usize]).fold(f32::INFINITY, f32::min);
        let next = logits.iter().copied().filter(|l| *l < least).fold(f32::NEG_INFINITY, f32::max);
        prop_assert!(allowed.contains_key(&id) || logits[id as usize] == next);
        prop_assert_eq!(chosen(&logits, sampling, position), id);
        let rank = logits.iter().filter(|l| **l > logits[id as usize]).count();
        prop_assert!(top_k == 0 || rank < top_k as usize);
    }

    /// Probabilities near the border may fall on either side of it.
    #[test]
    fn min_p_leaves_what_is_probable_enough(
        logits in proptest::collection::vec(-8.0f32..8.0, 1..200),
        temperature in 0.2f32..3.0,
        top_k in 0u32..50,
        min_p in 0.0f32..1.0,
        seed in any::<u64>(),
    ) {
        let sampling = Sampling { temperature, top_k, top_p: 1.0, seed };
        let allowed = probabilities(&logits, &sampling);
        let most = allowed.values().copied().fold(0.0, f64::max);
        for position in 0..20 {
            let id = sample_min_p(&logits, position, &sampling, min_p);
            prop_assert!(allowed[&id] >= f64::from(min_p) * most * (1.0 - 1e-9));
        }
        prop_assert_eq!(sample_min_p(&logits, 0, &sampling, 0.0), sample(&logits, 0, &sampling));
    }

    #[test]
    fn one_candidate_leaves_no_choice(
        logits in proptest::collection::vec(-20.0f32..20.0, 1..400),
        temperature in 0.05f32..3.0,
        seed in any::<u64>(),
    ) {
        let best = argmax(&logits);
        for (top_k, top_p) in [(1, 1.0), (0, 1e-6), (7, 1e-6)] {
            prop_assert_eq!(chosen(&logits, Sampling { temperature, top_k, top_p, seed }, 9), best);
        }
    }
}
