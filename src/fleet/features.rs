//! Features for choosing hosts: the facts of `vellum doctor` as names of [A-Za-z0-9_]. Slurm
//! accepts such names as node features.

use std::collections::BTreeSet;

use vellum_host::{Facts, Paging, hugepages};
use vellum_sys::keyvalue;

/// Features that exist on any host. Hosts also have `kernel_…` and `cpu_…`.
const KNOWN: [&str; 12] = [
    "eager_page_split",
    "emulated",
    "ept",
    "hugetlb_1g",
    "hugetlb_2m",
    "kvm",
    "npt",
    "pml",
    "shadow",
    "stage2",
    "tdp_mmu",
    "thp",
];

/// The features of this host.
pub fn here(facts: &Facts) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut add = |name: &str, there: bool| {
        if there {
            all.insert(name.to_owned());
        }
    };
    add("kvm", facts.module.is_some());
    add("emulated", facts.emulated);
    add("ept", facts.paging == Paging::Ept);
    add("npt", facts.paging == Paging::Npt);
    add("stage2", facts.paging == Paging::Stage2);
    add("shadow", facts.paging == Paging::Shadow);
    add("tdp_mmu", facts.tdp_mmu == Some(true));
    add("eager_page_split", facts.eager_page_split == Some(true));
    add("thp", facts.thp.as_deref().is_some_and(|thp| thp != "never"));
    let pml = std::fs::read_to_string("/sys/module/kvm_intel/parameters/pml");
    add("pml", pml.is_ok_and(|pml| pml.trim() == "Y"));
    add("hugetlb_2m", hugepages::free(2 << 20) > 0 && hugepages::sizes().contains(&(2 << 20)));
    add("hugetlb_1g", hugepages::free(1 << 30) > 0 && hugepages::sizes().contains(&(1 << 30)));
    // The release names one kernel. The version covers all its builds.
    let numbers: Vec<&str> = facts.kernel.split(['.', '-']).take(2).collect();
    add(&name("kernel", &numbers.join(".")), true);
    add(&name("kernel", &facts.kernel), true);
    add(&name("cpu", &facts.cpu), true);
    all
}

fn name(prefix: &str, text: &str) -> String {
    let mut name = String::from(prefix);
    for part in text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty()) {
        name.push('_');
        name.push_str(part);
    }
    name
}

/// Checks that a host can have a feature of that name.
///
/// # Errors
/// The error suggests the nearest known name.
pub fn check(feature: &str) -> Result<(), String> {
    if feature.is_empty() || !feature.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Err(format!("feature {feature:?}: a feature has only letters, digits and _"));
    }
    let families = ["kernel_", "cpu_"];
    if KNOWN.contains(&feature)
        || families.iter().any(|family| feature.len() > family.len() && feature.starts_with(family))
    {
        return Ok(());
    }
    Err(format!(
        "unknown feature '{feature}'{}: features are {}, kernel_VERSION and cpu_MODEL; `vellum doctor` prints those of a host",
        keyvalue::meant(feature, KNOWN.into_iter()),
        KNOWN.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_of_a_host_is_one_that_a_plan_may_name() {
        let mut facts = Facts::collect("off".into());
        facts.cpu = "Intel(R) Xeon(R) \u{1b}; #SBATCH é 8380".into();
        facts.kernel = "6.12.57+deb13-amd64".into();
        let all = here(&facts);
        assert!(all.contains("kernel_6_12") && all.contains("kernel_6_12_57_deb13_amd64"), "{all:?}");
        assert!(all.contains("cpu_Intel_R_Xeon_R_SBATCH_8380"), "{all:?}");
        all.iter().for_each(|feature| check(feature).unwrap());
    }

    #[test]
    fn others_are_refused_with_the_nearest() {
        assert!(check("hugetlb_2g").unwrap_err().contains("did you mean 'hugetlb_"));
        for bad in ["", "a b", "ept&npt", "$(id)", "kernel_", "tdpmmu"] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}
